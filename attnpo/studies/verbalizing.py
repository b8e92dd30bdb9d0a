"""Who is asked for verbalised importance: wording, model and decoding; the answers are kept, and counted when read.

Answers go into the store as text, by prompt: another reading of them, or an interrupted pass, generates nothing again.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnpo.models.spec import DTYPES
from attnpo.schema import (
    SIDES,
    Generator,
    Message,
    PairWeights,
    PreferencePair,
    Sampling,
    UserError,
    check_choice,
    check_least,
    digest,
)
from attnpo.studies.files import find_file
from attnpo.studies.judging import read_template
from attnpo.text.score_prompt import ScoreQuestions, ScoreTemplate
from attnpo.weights.base import Tools
from attnpo.weights.readings import AnswerStatistics, answer_statistics

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from attnpo.models.spec import ModelSpec
    from attnpo.text.chat import ChatFormat
    from attnpo.weights.cache import Store, Table

log = logging.getLogger(__name__)

ANSWERS = "answers"
ANSWER = "answer"
# Raised by hand with every change of the code that moves an answer.
ANSWERS_VERSION = "1"
BATCHES_AT_ONCE = 4
"""Batches of answers that go into the store together."""


@runtime_checkable
class GeneratorMaker(Protocol):
    """What makes a generator out of a loaded model in another way than free decoding."""

    def fingerprint(self) -> dict[str, Any]:
        """Every setting that changes an answer."""
        ...

    def generator(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Generator:
        """The generator."""
        ...


@dataclass(frozen=True)
class Verbalizer:
    """Who scores the parts of responses, and how.

    ``template_file``: the user message, with {question} and {answer}; ``system_file``: the system message, if any.
    ``path`` None is the run's own model and chat format. A prompt that leaves no room for ``sampling.max_new_tokens``
    within ``max_length`` tokens (None: the positions of the model) drops its pair. A batch has at most ``batch_size``
    prompts and ``token_budget`` tokens; neither changes an answer beyond rounding. ``known_parts``: a component that
    feeds the parts to the model and reads their scores, for models that cannot quote.
    """

    template_file: str
    system_file: str | None = None
    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    chat_template: str | None = None
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=2048, temperature=0.0))
    batch_size: int = 16
    token_budget: int = 65536
    max_length: int | None = None
    known_parts: GeneratorMaker | None = None

    def __post_init__(self) -> None:
        check_choice("verbalizer.dtype", self.dtype, DTYPES)
        for name in ("batch_size", "token_budget", "max_length"):
            check_least("verbalizer", 1, **{name: getattr(self, name)})

    def template(self) -> ScoreTemplate:
        """The wording, read from its files."""
        system = None if self.system_file is None else find_file(self.system_file, "verbalizer.system_file")
        return ScoreTemplate.from_files(find_file(self.template_file, "verbalizer.template_file"), system)

    def unread(self) -> dict[str, str]:
        """Keys without effect: greedy decoding draws nothing, the run's own model has its own revision and chat."""
        found: dict[str, str] = {}
        if self.sampling.temperature == 0:
            found |= dict.fromkeys(
                ("sampling.top_p", "sampling.top_k", "sampling.seed"), "verbalizer.sampling.temperature=0"
            )
        if self.path is None:
            own = "the verbalizer is the model itself (verbalizer.path=null)"
            found |= {"revision": own, "chat_template": own}
        return found


class VerbalizerRoom:
    """A verbalizer that is described cheaply and loaded only when an answer is missing.

    Args:
        verbalizer: the component.
        model: the run's model, which answers unless ``verbalizer.path`` names another.
        chat: the run's chat format: that of the prompts unless another model is named, and always that of the tokens.
        store: where the answers are kept.
    """

    def __init__(self, verbalizer: Verbalizer, model: "ModelSpec", chat: "ChatFormat", store: "Store") -> None:
        from attnpo.models.loading import load_tokenizer
        from attnpo.text.chat import ChatFormat

        own = verbalizer.path is None
        self.verbalizer = verbalizer
        self.path = model.path if verbalizer.path is None else verbalizer.path
        self.revision = model.revision if own else verbalizer.revision
        asked = chat
        if not own:
            tokenizer = load_tokenizer(self.path, self.revision)
            asked = ChatFormat(tokenizer, read_template(verbalizer.chat_template, "verbalizer.chat_template"))
        self.chat = asked
        self.questions = ScoreQuestions(verbalizer.template(), asked, chat, self._prompt_room())
        self._store = store

    def _prompt_room(self) -> int | None:
        """Tokens that a prompt may have; UserError when the answer alone takes all there are."""
        from attnpo.models.described import require_exact
        from attnpo.models.generate import context_length
        from attnpo.models.loading import text_config

        config = text_config(self.path, self.revision)
        limit = self.verbalizer.max_length
        if limit is None:
            limit = context_length(config)
        else:
            require_exact(config, self.path, "verbalizer.max_length", limit)
        new = self.verbalizer.sampling.max_new_tokens
        if limit is not None and limit <= new:
            source = "verbalizer.max_length" if self.verbalizer.max_length is not None else f"positions of {self.path}"
            raise UserError(
                f"verbalizer.sampling.max_new_tokens={new} leaves no room for a prompt within {limit} tokens "
                f"({source}): lower it"
            )
        return None if limit is None else limit - new

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the answers to given prompts: model weights, number format, decoding, chat format."""
        from attnpo.models.loading import weights_fingerprint

        maker = self.verbalizer.known_parts
        return {
            "weights": weights_fingerprint(self.path, self.revision),
            "dtype": self.verbalizer.dtype,
            "sampling": asdict(self.verbalizer.sampling),
            "chat": self.chat.fingerprint(),
            "known_parts": None if maker is None else maker.fingerprint(),
            "code": ANSWERS_VERSION,
        }

    def _answers(self) -> "Table":
        return self._store.table(ANSWERS, self.fingerprint())

    def tools(self, device: "torch.device") -> Tools:
        """Generator, questions and decoding for capturing; the model is loaded when the first answer is missing."""
        at_once = BATCHES_AT_ONCE * self.verbalizer.batch_size
        generator = KeptAnswers(self._answers(), lambda: self._generator(device), at_once)
        return Tools(generator=generator, questions=self.questions, sampling=self.verbalizer.sampling)

    def _generator(self, device: "torch.device") -> Generator:
        from attnpo.models.generate import HFGenerator
        from attnpo.models.loading import load_model

        model = load_model(self.path, dtype=self.verbalizer.dtype, revision=self.revision)
        model.to(device)  # type: ignore[arg-type]
        if self.verbalizer.known_parts is not None:
            return self.verbalizer.known_parts.generator(model, self.chat.tokenizer)
        return HFGenerator(
            model,
            self.chat.tokenizer,
            self.chat.prompt_ids,
            batch_size=self.verbalizer.batch_size,
            token_budget=self.verbalizer.token_budget,
            end_ids=sorted(self.chat.end_ids),
        )

    def statistics(self, pairs: Sequence[PreferencePair], captured: Mapping[str, PairWeights]) -> AnswerStatistics:
        """How well the answers about ``pairs`` could be read, from the texts in the store."""
        asked = {
            (pair.pair_id, side): prompt_key(self.questions.messages(pair, side))
            for pair in pairs
            if pair.pair_id in captured and captured[pair.pair_id].rounds
            for side in SIDES
        }
        stored = kept(self._answers(), list(asked.values()))
        return answer_statistics(pairs, captured, {at: stored[key] for at, key in asked.items() if key in stored})


def prompt_key(prompt: Sequence[Message]) -> str:
    """The name under which the answer to a prompt is kept."""
    return digest([[turn["role"], turn["content"]] for turn in prompt])[:32]


def kept(table: "Table", keys: Sequence[str]) -> dict[str, str]:
    """The stored answers among ``keys``."""
    known = [key for key, columns in table.columns_present(keys).items() if ANSWER in columns]
    return {key: str(row[ANSWER]) for key, row in table.read(known, [ANSWER]).items()}


class KeptAnswers:
    """A generator that keeps its answers in a table and asks ``make``'s generator for missing ones only.

    Equal prompts get one answer. ``make`` is called at most once. Answers are stored, and their number is logged,
    whenever there are ``at_once`` of them: an interruption loses no more.
    """

    def __init__(self, table: "Table", make: Callable[[], Generator], at_once: int = 64) -> None:
        self.table, self.make, self.at_once = table, make, at_once
        self._generator: Generator | None = None

    def generate(self, prompts: Sequence[Sequence[Message]], sampling: Sampling) -> list[str]:
        """One answer per prompt, in their order."""
        keys = [prompt_key(prompt) for prompt in prompts]
        found = kept(self.table, keys)
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in found}
        if missing and self._generator is None:
            self._generator = self.make()
        # The longest first, as within a batch: what does not fit into memory fails at once, and little is padded.
        waiting = iter(sorted(missing, key=lambda key: -sum(len(turn["content"]) for turn in missing[key])))
        done, began = 0, time.perf_counter()
        while self._generator is not None and (some := list(islice(waiting, self.at_once))):
            answers = self._generator.generate([missing[key] for key in some], sampling)
            new = dict(zip(some, answers, strict=True))
            self.table.append({key: {ANSWER: text} for key, text in new.items()})
            found |= new
            done += len(new)
            log.info("verbalizer: %d of %d answers, %.0f s", done, len(missing), time.perf_counter() - began)
        return [found[key] for key in keys]
