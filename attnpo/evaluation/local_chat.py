"""Local Hugging Face models as answering backends or graders; graders use generated text or label logits.

Calls with labels need one forward pass: ``judge.causal_judge.CausalJudge`` reads the log-probabilities of the two
labels at the last prompt token. Replies to other calls are generated in left-padded batches.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from attnpo.config.named_files import read_template
from attnpo.evaluation.chat import (
    LENGTH,
    STOP,
    ChatModel,
    ChatRequest,
    GradingCall,
    GradingFailure,
    GradingReply,
    Price,
    Reply,
)
from attnpo.judge.base import JudgeReading
from attnpo.judge.prompts import label_token_ids
from attnpo.models.spec import BATCH_SIZE, DTYPES, TOKEN_BUDGET, ModelSpec
from attnpo.schema import BOOKKEEPING, Message, Sampling, UserError, check_at_least, check_choice
from attnpo.system.machine import inference_device
from attnpo.text.chat import SENTINEL, ChatFormat, RefusedText

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnpo.judge.causal_judge import CausalJudge
    from attnpo.models.generate import HFGenerator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HFAnswering:
    """Answering backend for a model in a local folder or on the hub.

    A batch has at most ``batch_size`` prompts and ``token_budget`` tokens (padded prompts plus space for answers);
    neither affects sampling. ``max_length``: maximum number of tokens in prompt and answer together (None: the model's
    number of positions).
    """

    batch_size: int = field(default=BATCH_SIZE, metadata=BOOKKEEPING)
    token_budget: int = field(default=TOKEN_BUDGET, metadata=BOOKKEEPING)
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_at_least("answering", 1, **asdict(self))

    def open(self, model: ModelSpec, device: torch.device) -> ChatModel:
        """Reads config and tokenizer; the weights are loaded onto ``device`` on the first request."""
        from attnpo.models.generate import max_sequence_length

        spec, chat = describe_model(model)
        limit = max_sequence_length(spec.path, spec.revision, "answering.max_length", self.max_length)
        return LocalChatModel(self, spec, chat, limit, device)


@dataclass
class LocalChatModel:
    """Local chat model that is loaded on the first request."""

    settings: HFAnswering
    model: ModelSpec
    chat: ChatFormat
    limit: int | None
    device: torch.device

    @property
    def counted_by(self) -> str:
        """Returns the model's path, since the model's own tokenizer counts the tokens."""
        return self.model.path

    def key(self) -> dict[str, object]:
        """Returns fingerprints of weights, end tokens, dtype, attention kernel and chat format."""
        from attnpo.models.generate import extra_end_ids
        from attnpo.models.loading import resolve_attention, weights_fingerprint

        model = self.model
        return {
            "model": {**weights_fingerprint(model.path, model.revision), **extra_end_ids(model.path)},
            "model.dtype": model.dtype,
            "model.attn_implementation": resolve_attention(model.path, model.revision, model.attn_implementation),
            "chat": self.chat.fingerprint(),
        }

    @cached_property
    def _generator(self) -> "HFGenerator":
        from attnpo.models.generate import make_chat_generator
        from attnpo.models.loading import load_model

        model = self.model
        loaded = load_model(
            model.path, dtype=model.dtype, attn_implementation=model.attn_implementation, revision=model.revision
        )
        loaded.to(self.device)  # type: ignore[arg-type]
        return make_chat_generator(loaded, self.chat, self.settings.batch_size, self.settings.token_budget)

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Generates replies batch by batch, with the longest prompts first."""
        from attnpo.models.generate import GenerationRequest

        if not asked:
            return
        requests = [GenerationRequest(one.ids, one.draw) for one in asked]
        for batch in self._generator.batches(requests, sampling):
            answers = self._generator.generate_batch([requests[index] for index in batch], sampling)
            yield {
                index: Reply(answer.text, answer.tokens, STOP if answer.ended else LENGTH)
                for index, answer in zip(batch, answers, strict=True)
            }


def describe_model(model: ModelSpec) -> tuple[ModelSpec, ChatFormat]:
    """Reads a model's specification, including the chat template, and its chat format, without loading weights.

    Raises:
        UserError: the model cannot generate answers, because it is a reward model, has adapters to train, or its path
            is a run folder.
    """
    from transformers.utils import logging as quiet

    from attnpo.models.loading import load_chat

    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    if model.lora is not None:
        raise UserError("model.lora is only for training: remove it (a run's best/ and last/ have merged adapters)")
    if model.reward:
        raise UserError("model.reward=true is only for training: remove it; a reward model cannot generate answers")
    folder = Path(model.path).expanduser()
    inside = [name for name in ("best", "last") if (folder / name / "config.json").is_file()]
    if inside and not (folder / "config.json").is_file():
        raise UserError(
            f"model.path={model.path} is a run folder: use the model inside it, model.path={folder / inside[0]}"
        )
    return load_chat(model)


def read_chat(
    path: str, revision: str | None, chat_template: str | None, part: str, fold_system: bool = False
) -> ChatFormat:
    """Reads a model's chat format; ``part`` is the config node with ``path`` and ``chat_template``, for messages."""
    from attnpo.models.description import config_vocabulary_size
    from attnpo.models.loading import load_text_config, load_tokenizer

    template = read_template(chat_template, f"{part}.chat_template")
    try:
        tokenizer, rows = load_tokenizer(path, revision), config_vocabulary_size(load_text_config(path, revision))
        return ChatFormat(tokenizer, template, fold_system=fold_system, part=part, rows=rows)
    except UserError as problem:
        raise UserError(f"{part}.path={path}: {problem}".replace("model.chat_", f"{part}.chat_")) from problem


# Increase with every code change that changes a reply.
CODE_VERSION = "1"
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")  # as trainer.accelerator
ROOM_STEP = 256
"""Shortened reply limits are rounded down to a multiple of this, so that prompts of similar length share batches."""

Outcome = tuple[GradingCall, GradingReply | GradingFailure]
_Asked = tuple[GradingCall, list[int]]
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class LocalGrader:
    """Grader that runs a causal LM from a local folder or the hub.

    ``chat_template``: Jinja text or path, for tokenizers without one. At most ``batch_size`` calls are processed at
    once, and a forward pass or generation batch has at most ``token_budget`` tokens (but always at least one call).
    ``max_length``: maximum number of tokens in prompt and reply together (None: the model's number of positions);
    longer prompts fail, and replies are limited to the remaining space. ``accelerator=cpu`` keeps the model off the
    GPU.

    Label probabilities ignore a call's temperature. Generated replies are seeded by the call's prompt, round and
    repeat, and do not depend on the batch.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    batch_size: int = field(default=32, metadata=BOOKKEEPING)
    token_budget: int = field(default=16384, metadata=BOOKKEEPING)
    max_length: int | None = None
    accelerator: str = field(default="auto", metadata=BOOKKEEPING)

    def __post_init__(self) -> None:
        check_choice("grader.dtype", self.dtype, DTYPES)
        check_choice("grader.accelerator", self.accelerator, ACCELERATORS)
        check_at_least(
            "grader", 1, batch_size=self.batch_size, token_budget=self.token_budget, max_length=self.max_length
        )

    # ------------------------------------------------------------------------------------------ model

    @property
    def price(self) -> Price:
        """Returns a price of 0, since the model runs locally."""
        return Price()

    def check_ready(self) -> None:
        """Checks that model and tokenizer can be read, without loading weights.

        Raises:
            UserError: one of them cannot be read.
        """
        self.identity()

    def identity(self) -> dict[str, object]:
        """Returns fingerprints of weights, dtype, attention kernel, chat format and length limit; loads no weights.

        Raises:
            UserError: model or tokenizer cannot be read.
        """
        from attnpo.models.generate import extra_end_ids
        from attnpo.models.loading import weights_fingerprint

        return {
            "grader": "local",
            "weights": {**weights_fingerprint(self.path, self.revision), **extra_end_ids(self.path)},
            "dtype": self.dtype,
            "kernel": self._attention_kernel,
            "chat": self._chat.fingerprint(),
            "max_length": self._limit,
            "code": CODE_VERSION,
        }

    def count_tokens(self, call: GradingCall) -> int | None:
        """Counts the tokens of a call's prompt, including special tokens; returns None if the chat template fails."""
        try:
            return len(self._prompt_ids(call.messages))
        except RefusedText:
            return None

    @cached_property
    def _attention_kernel(self) -> str:
        from attnpo.judge.causal_judge import kernel_for
        from attnpo.models.loading import inspect_model

        return kernel_for(inspect_model(self.path, self.revision))

    @cached_property
    def _chat(self) -> ChatFormat:
        return read_chat(self.path, self.revision, self.chat_template, "grader")

    @cached_property
    def _limit(self) -> int | None:
        from attnpo.models.generate import max_sequence_length

        return max_sequence_length(self.path, self.revision, "grader.max_length", self.max_length)

    @cached_property
    def _model(self) -> "PreTrainedModel":
        from attnpo.models.loading import inspect_model, load_model

        reading = inspect_model(self.path, self.revision).judge_attention
        model = load_model(self.path, dtype=self.dtype, revision=self.revision, attn_implementation=reading)
        model.to(inference_device(self.accelerator))  # type: ignore[arg-type]
        return model

    @cached_property
    def _judge(self) -> "CausalJudge":
        from attnpo.judge.causal_judge import CausalJudge

        return CausalJudge(self._model, token_budget=self.token_budget, kernel=self._attention_kernel)

    @cached_property
    def _generator(self) -> "HFGenerator":
        from attnpo.models.generate import make_chat_generator

        return make_chat_generator(self._model, self._chat, self.batch_size, self.token_budget)

    # ------------------------------------------------------------------------------------------ asking

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[Outcome]:
        """Yields each call with its reply, processing ``batch_size`` calls at a time.

        Prompts that are too long or rejected by the chat template yield failures.

        Raises:
            UserError: a label is not a single token for this model, so every call would fail.
        """
        waiting = iter(calls)
        while pulled := list(islice(waiting, self.batch_size)):
            failed: list[Outcome] = []
            asked: list[_Asked] = []
            for call in pulled:
                outcome = self._encode_call(call)
                if isinstance(outcome, GradingFailure):
                    failed.append((call, outcome))
                else:
                    asked.append((call, outcome))
            labelled = self._read_labels([item for item in asked if item[0].labels])
            written = self._generate_replies([item for item in asked if not item[0].labels])
            # Failures alternate with replies, so that a few do not look like an outage to a count of consecutive ones.
            for answered in chain(labelled, written):
                yield answered
                if failed:
                    yield failed.pop(0)
            yield from failed

    def _encode_call(self, call: GradingCall) -> list[int] | GradingFailure:
        """Tokenizes a call's prompt; returns a failure if the call cannot be answered."""
        if call.labels and len(call.labels) != 2:
            return GradingFailure(f"a local grader supports exactly two labels, but this call has {call.labels}")
        try:
            ids = self._prompt_ids(call.messages)
        except RefusedText as problem:
            return GradingFailure(str(problem).replace("model.chat_template", "grader.chat_template"))
        # A generated reply needs at least one more position; a label is read at the prompt's last token.
        room = None if self._limit is None else self._limit - len(ids) + bool(call.labels)
        if room is not None and room < 1:
            return GradingFailure(
                f"the prompt has {len(ids)} tokens, but {self.path} allows {self._limit}"
                + ("" if call.labels else " including the reply")
            )
        return ids

    def _read_labels(self, asked: Sequence[_Asked]) -> Iterator[Outcome]:
        """Uses label logits to answer calls; calls with the same label tokens share forward passes."""
        for label_ids, group in _group_by(asked, lambda item: self._label_ids(item[0])):
            began = time.perf_counter()
            prompts = [ids for _, ids in group]
            try:
                readings = self._judge.read(prompts, layers=(), verdict=True, label_ids=label_ids)
            except UserError as problem:
                raise UserError(str(problem).replace("judge.path", "grader.path")) from problem
            seconds = (time.perf_counter() - began) / len(group)
            for (call, ids), reading in zip(group, readings, strict=True):
                yield call, self._make_label_reply(call.labels, label_ids, reading, len(ids), seconds)

    def _make_label_reply(
        self, labels: Sequence[str], label_ids: Sequence[int], reading: JudgeReading, tokens: int, seconds: float
    ) -> GradingReply:
        """Builds a reply with the likelier label, or the first if tied.

        If the most likely token is not a label, the reply also lists its log-probability.
        """
        assert reading.verdict_logps is not None and reading.verdict_token is not None
        first, second, most = (float(value) for value in reading.verdict_logps)
        logprobs = dict(zip(labels, (first, second), strict=True))
        if reading.verdict_token not in label_ids:
            logprobs[self._token_text(reading.verdict_token, labels)] = most
        return GradingReply(
            text=labels[0] if first >= second else labels[1],
            logprobs=logprobs,
            input_tokens=tokens,
            output_tokens=1,
            seconds=seconds,
        )

    def _token_text(self, token: int, labels: Sequence[str]) -> str:
        """Returns a token's text, or its vocabulary entry if the text is empty or equal to a label."""
        text = str(self._chat.tokenizer.decode([token]))
        entry = str(self._chat.tokenizer.convert_ids_to_tokens(token)) if text in labels or not text else text
        return f"token {token}" if entry in labels else entry

    def _generate_replies(self, asked: Sequence[_Asked]) -> Iterator[Outcome]:
        """Generates replies; calls with the same sampling settings share batches."""
        from attnpo.models.generate import GenerationRequest

        for sampling, group in _group_by(asked, lambda item: self._reply_sampling(item[0], len(item[1]))):
            requests = [GenerationRequest(ids, call.repeat) for call, ids in group]
            for batch in self._generator.batches(requests, sampling):
                began = time.perf_counter()
                answers = self._generator.generate_batch([requests[index] for index in batch], sampling)
                seconds = (time.perf_counter() - began) / len(batch)
                for index, answer in zip(batch, answers, strict=True):
                    call, ids = group[index]
                    ended = STOP if answer.ended else LENGTH
                    yield call, GradingReply(answer.text, ended, None, len(ids), answer.tokens, seconds)

    def _reply_sampling(self, call: GradingCall, tokens: int) -> Sampling:
        """Returns a call's sampling settings, limiting the reply to the space left by a prompt of ``tokens`` tokens."""
        asked = Sampling(
            max_new_tokens=call.max_tokens, temperature=call.temperature, top_p=call.top_p, seed=call.round
        )
        if self._limit is None or tokens + call.max_tokens <= self._limit:
            return asked
        if not self._has_warned:
            self._has_warned.append(True)
            log.warning(
                "grader: some prompts are so long that the %d-token limit of %s leaves less room for a reply than the "
                "benchmark allows: replies may be truncated (finish_reason=length)",
                *(self._limit, self.path),
            )
        room = self._limit - tokens
        return replace(asked, max_new_tokens=room - room % ROOM_STEP if room > ROOM_STEP else room)

    @cached_property
    def _has_warned(self) -> list[bool]:
        return []

    # ------------------------------------------------------------------------------------------ prompts

    def _label_ids(self, call: GradingCall) -> tuple[int, int]:
        known, roles = self._known_labels, tuple(turn["role"] for turn in call.messages)
        if (roles, call.labels) not in known:
            turns = [Message(role=role, content="x") for role in roles]
            chat = self._chat_for(turns)
            key = f"grader.path={self.path}, the benchmark's labels"
            first, second = label_token_ids(chat, chat.render(turns, add_generation_prompt=True), call.labels, key)
            known[roles, call.labels] = (first, second)
        return known[roles, call.labels]

    @cached_property
    def _known_labels(self) -> dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[int, int]]:
        return {}

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._chat_for(messages).prompt_ids(messages)

    def _chat_for(self, messages: Sequence[Message]) -> ChatFormat:
        return self._chat_with_system if any(turn["role"] == "system" for turn in messages) else self._chat

    @cached_property
    def _chat_with_system(self) -> ChatFormat:
        """Returns a chat format that keeps system turns, which some templates reject or drop."""
        probe = [Message(role="system", content=SENTINEL), Message(role="user", content="a")]
        try:
            if SENTINEL in self._chat.render(probe, add_generation_prompt=True):
                return self._chat
        except RefusedText as problem:
            log.debug("the grader's chat template rejects system turns: %s", problem)
        log.warning(
            "grader: the chat template of %s has no system turn, so system text is prepended to the first user turn",
            self.path,
        )
        return read_chat(self.path, self.revision, self.chat_template, "grader", fold_system=True)


def _group_by(items: Iterable[_Asked], key: Callable[[_Asked], _Key]) -> list[tuple[_Key, list[_Asked]]]:
    """Groups items by key, in order of first occurrence."""
    groups: dict[_Key, list[_Asked]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())
