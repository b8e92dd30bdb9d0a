"""Model behind an OpenAI-compatible server that answers and grades: OpenAI's, or vLLM with a folder."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from attnpo.evaluation.chat import (
    LENGTH,
    Answerer,
    ChatRequest,
    GradingCall,
    GradingFailure,
    GradingReply,
    Price,
    Reply,
)
from attnpo.evaluation.local_chat import describe_model
from attnpo.evaluation.served import (
    ESCAPED,
    NO_KEY,
    Completion,
    describe,
    in_threads,
    open_client,
    read_completion,
    warn_of,
)
from attnpo.models.spec import ModelSpec
from attnpo.schema import BOOKKEEPING, Sampling, UserError, check_at_least, check_choice, digest
from attnpo.system.credentials import redact
from attnpo.system.packages import install_command
from attnpo.text.chat import ChatFormat, RefusedText
from attnpo.text.template import get_tools, to_template_turns

if TYPE_CHECKING:
    import tiktoken
    from openai import OpenAI

log = logging.getLogger(__name__)

TOO_LONG = "too long for the server"
NO_COUNT = "no count of their tokens (usage.completion_tokens), which are written as 0"
# What servers say of a prompt that is too long: OpenAI's code, and the words of vLLM and of those that follow it.
TOO_LONG_CODE, TOO_LONG_WORDS = "context_length_exceeded", "maximum context length"
FILTERED = "content_filter"  # Azure's code for a prompt that it does not pass on
OUT_OF_CREDIT = "insufficient_quota"  # OpenAI's code of a 429 that no waiting mends

SERVICE = "https://api.openai.com/v1"
ADDRESS = "OPENAI_BASE_URL"  # the client's own variable for another address
KEY = "OPENAI_API_KEY"  # the client's own variable for the key, of its own address or of that
LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
# Tokens of OpenAI's chat format: around a turn with its role, and ahead of the reply (OpenAI Cookbook, "How to count
# tokens with tiktoken").
OF_TURN, BEGINS_REPLY = 4, 3

_Item = TypeVar("_Item")

# ------------------------------------------------------------------------------------------------ the server


@dataclass(frozen=True)
class _Problem:
    """Reason why a request got no completion after all retries; ``status`` 0 where no error of the server says so."""

    text: str
    status: int = 0
    code: str | None = None
    param: str | None = None

    @property
    def may_pass(self) -> bool:
        return self.status in (0, 408, 409, 429) or self.status >= 500


@dataclass(frozen=True)
class _Endpoint:
    """Server as ``part`` of a configuration (answering, grader) names it; ``key_variable`` None: no key is sent."""

    part: str
    address: str
    model: str
    key_variable: str | None
    timeout: float
    retries: int
    concurrency: int

    @property
    def place(self) -> str:
        """Returns the address for readers."""
        return str(redact(self.address))

    def complete(
        self, items: Iterable[_Item], body_of: Callable[[_Item], Mapping[str, object]]
    ) -> Iterator[tuple[_Item, Completion | _Problem, float]]:
        """Yields each item with what the server says to its request and the seconds it took, as they come.

        UserError for a key, a model or an account that no other request would fare better with.
        """
        key = os.environ.get(self.key_variable or "") or NO_KEY
        client = open_client(self.address, key, self.timeout, self.retries, self.concurrency)
        retried: list[int] = []
        notes: list[str] = []

        def ask(item: _Item) -> tuple[Completion | _Problem, float]:
            began = time.monotonic()
            return _ask(client, body_of(item), retried), time.monotonic() - began

        try:
            for item, (found, seconds) in in_threads(ask, items, self.concurrency):
                if isinstance(found, _Problem):
                    self._check_mendable(client, found)
                elif found.escaped:
                    notes.append(ESCAPED)
                yield item, found, seconds
            client.close()  # not where this is left early: threads may still be reading
        finally:
            warn_of(self.address, notes)
            if retried:
                told = "%s: %d of the calls were answered after repeating them, %d times in all"
                log.info(told, self.place, len(retried), sum(retried))

    def _check_mendable(self, client: "OpenAI", problem: _Problem) -> None:
        """Raises UserError for what every request would meet, with what can be done about it."""
        variable = self.key_variable
        if problem.status in (401, 403):
            what = "a request without a key" if variable is None else f"the key in {variable}"
            raise UserError(
                f"{self.place} refuses {what} ({problem.text}): expected a key that may use {self.part}.model in the "
                f"environment variable {variable or f'that {self.part}.key_variable=NAME names'}"
            )
        if problem.status == 404:
            from openai import OpenAIError

            served = f"see its list at {self.place}/models"
            with suppress(OpenAIError, ValueError):
                served = "it serves " + ", ".join(model.id for model in client.models.list().data)
            raise UserError(
                f"{self.place} does not serve {self.part}.model={self.model} ({problem.text}): {served}; or "
                f"{self.part}.base_url does not end as the server wants it (mostly /v1)"
            )
        if problem.code == OUT_OF_CREDIT:
            raise UserError(
                f"{self.place}: the account{f' of the key in {variable}' if variable else ''} is out of credit "
                f"({problem.text}); the replies so far are stored, the same command goes on from there"
            )

    def require_ready(self, variable: str | None) -> None:
        """Raises UserError without the client's packages, or without the key that ``variable`` promises."""
        if find_spec("openai") is None or find_spec("httpx2") is None:
            raise UserError(
                f"{self.part}=openai needs the packages openai (3 or later) and httpx2; they come with the extra "
                f"`eval`: {install_command('eval')}"
            )
        if variable is not None and not os.environ.get(variable):
            raise UserError(
                f"{self.part}.key_variable={variable}: expected the key of {self.place} in the environment variable "
                f"{variable}, which is not set; set it, or name a server that asks for none with "
                f"{self.part}.key_variable=null {self.part}.base_url=http://HOST:PORT/v1"
            )


def _ask(client: "OpenAI", body: Mapping[str, object], retried: list[int]) -> Completion | _Problem:
    """Returns what comes of one request; the client waits and tries again by itself."""
    from openai import APIStatusError, OpenAIError

    try:
        raw = client.chat.completions.with_raw_response.create(**body)  # type: ignore[call-overload]
        found = read_completion(raw.http_response, logprobs="top_logprobs" in body)
    except APIStatusError as problem:
        return _Problem(describe(problem), problem.status_code, problem.code, problem.param)
    except (OpenAIError, ValueError) as problem:
        return _Problem(describe(problem))
    if raw.retries_taken:
        retried.append(raw.retries_taken)
    return found


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class OpenAIAnswering:
    """Server that speaks OpenAI's chat completions.

    ``base_url`` ends in /v1 as a rule. ``model``: its name there (None: ``model.path`` as given, as vLLM names what it
    serves). ``key_variable`` names the environment variable with the key, None for a server that asks for none.
    ``concurrency`` requests are open at a time; each is tried ``retries`` times again, with back-off, and may take
    ``timeout`` seconds. ``extensions`` sends what OpenAI's own servers refuse and vLLM and its like take: top_k,
    stop_token_ids, and the neutral values of what a folder's generation config would set else. Prompt and answer have
    at most ``max_length`` tokens (None: the positions that the folder states, or what the server takes).
    """

    base_url: str = field(metadata=BOOKKEEPING)
    model: str | None = None
    key_variable: str | None = field(default=None, metadata=BOOKKEEPING)
    concurrency: int = field(default=32, metadata=BOOKKEEPING)
    timeout: float = field(default=600.0, metadata=BOOKKEEPING)
    retries: int = field(default=8, metadata=BOOKKEEPING)
    extensions: bool = True
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_at_least("answering", 1, concurrency=self.concurrency, timeout=self.timeout, max_length=self.max_length)
        check_at_least("answering", 0, retries=self.retries)
        if not self.base_url.startswith(("http://", "https://")):
            raise UserError(
                f"answering.base_url={self.base_url}: expected the address of a server, such as "
                "http://localhost:8000/v1"
            )

    def open(self, model: ModelSpec, device: torch.device) -> Answerer:
        """Reads the folder that is served, where ``model.path`` is one here; the server is not asked yet.

        UserError without the package openai, or without the key that ``key_variable`` promises.
        """
        from attnpo.models.generate import max_sequence_length

        self.endpoint(self.model or model.path).require_ready(self.key_variable)
        if model.fold_system:
            raise UserError(
                "model.fold_system=true cannot reach a server, which renders its own chat template: leave it out and "
                "serve a folder whose template folds the system turn (what a run with this option exports does)"
            )
        if not Path(model.path).expanduser().is_dir():
            log.info("%s is no folder here: its name on the server stands for its weights", model.path)
            return ServedAnswerer(self, model, None, self.max_length)
        spec, chat = describe_model(model)
        limit = max_sequence_length(spec.path, spec.revision, "answering.max_length", self.max_length)
        return ServedAnswerer(self, spec, chat, limit)

    def endpoint(self, model: str) -> _Endpoint:
        """Returns the server that is asked for ``model``."""
        return _Endpoint(
            "answering", self.base_url, model, self.key_variable, self.timeout, self.retries, self.concurrency
        )


@dataclass
class ServedAnswerer:
    """Served model. ``chat`` is None where ``model.path`` is no folder on this machine."""

    settings: OpenAIAnswering
    model: ModelSpec
    chat: ChatFormat | None
    limit: int | None

    @property
    def name(self) -> str:
        """Returns the model's name on the server."""
        return self.settings.model or self.model.path

    @property
    def counted_by(self) -> str:
        """Returns the server, whose ``usage`` it is."""
        return f"{self.name} (the server's usage)"

    def key(self) -> dict[str, object]:
        """Returns weights and chat format of the folder, or the name on the server. The address is none of it."""
        from attnpo.models.loading import weights_fingerprint

        if self.chat is None:
            kwargs = self.model.chat_template_kwargs
            return {
                "answering": "server",
                "model": {"served": self.name},
                **({"chat_template_kwargs": dict(kwargs)} if kwargs else {}),
            }
        weights = weights_fingerprint(self.model.path, self.model.revision)
        return {"answering": "server", "model": weights, "chat": self.chat.fingerprint()}

    def parameters(self, one: ChatRequest, sampling: Sampling) -> dict[str, object]:
        """Returns the body of a request. The seed follows from that of the sampling, the conversation and the draw.

        A server draws the same random numbers for the same seed: one seed for all would tie the answers to each other.

        UserError for settings that only ``extensions`` can send.
        """
        seed = int(digest([sampling.seed, list(one.messages), one.draw])[:8], 16) >> 1  # 31 bits fit everywhere
        tools, kwargs = get_tools(one.messages), self.model.chat_template_kwargs
        body = {
            "model": self.name,
            "messages": to_template_turns(one.messages),
            **({} if tools is None else {"tools": tools}),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": seed,
        }
        if self.settings.extensions:
            ends = set(sampling.stop_ids) | (set() if self.chat is None else set(self.chat.end_ids))
            neutral = {"top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
            body["extra_body"] = (
                neutral
                | ({"stop_token_ids": sorted(ends)} if ends else {})
                | ({"chat_template_kwargs": dict(kwargs)} if kwargs else {})
            )
        elif kwargs:
            raise UserError(
                "answering.extensions=false cannot send model.chat_template_kwargs to the server: leave them out, or "
                "set answering.extensions=true"
            )
        elif sampling.top_k or sampling.stop_ids:
            raise UserError(
                f"answering.extensions=false cannot send sampling.top_k={sampling.top_k} and sampling.stop_ids="
                f"{list(sampling.stop_ids)}: set them to 0 and [], or answering.extensions=true"
            )
        return body

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Replies one by one. UserError, last, for what the server gave no answer to after all retries.

        A server that has failed ``concurrency`` times in a row is asked no more, one that refuses (key, name of the
        model, parameters) at once.
        """
        if not asked:
            return
        bodies = [self.parameters(one, sampling) for one in asked]
        problems: list[str] = []
        notes: list[str] = []
        in_a_row = done = 0
        try:
            for index, found, _ in self.settings.endpoint(self.name).complete(range(len(bodies)), bodies.__getitem__):
                done += 1
                if isinstance(found, _Problem) and found.may_pass:
                    in_a_row += 1
                    problems.append(found.text)
                    if in_a_row >= self.settings.concurrency:
                        break
                    continue
                in_a_row = 0
                if isinstance(found, _Problem):
                    yield {index: self._without_answer(found)}
                    continue
                notes += [NO_COUNT] * (found.output_tokens is None)
                yield {index: Reply(found.text, found.output_tokens or 0, found.finish_reason, found.missing)}
        finally:
            warn_of(self.settings.base_url, notes)
        if problems:
            rest = "" if done == len(asked) else f", and was then not asked for {len(asked) - done} more"
            raise UserError(
                f"the server at answering.base_url={redact(self.settings.base_url)} did not answer {len(problems)} of "
                f"{done} conversations{rest}; the first: {problems[0]}. What it answered is kept: give the command "
                "again"
            )

    def _without_answer(self, problem: _Problem) -> Reply:
        """Returns the empty reply to a prompt that the server does not take; UserError where it is the parameters."""
        if problem.code == TOO_LONG_CODE or TOO_LONG_WORDS in problem.text:
            return Reply("", 0, LENGTH, refused=TOO_LONG)
        if problem.code == FILTERED:
            return Reply("", 0, FILTERED, refused="filtered by the server")
        help_ = "the text above is the server's own"
        if self.settings.extensions:
            help_ = "a server that does not know top_k and stop_token_ids needs answering.extensions=false"
        raise UserError(
            f"the server at answering.base_url={redact(self.settings.base_url)} refused a request for the model "
            f"{self.name!r} with status {problem.status}: {problem.text}; {help_}"
        )


# ------------------------------------------------------------------------------------------------ grades


@dataclass(frozen=True)
class OpenAIGrader:
    """Model that an OpenAI-compatible endpoint serves.

    ``base_url`` None: that of ``OPENAI_BASE_URL``, or OpenAI's service. The key is read from the environment variable
    ``key_variable``; None: from ``OPENAI_API_KEY``, and a ``base_url`` that is given is sent no key. ``concurrency``
    calls are open at once, each try ends after ``timeout`` seconds, and up to ``max_retries`` follow the first, not
    where the server asks for more than two minutes of patience.
    ``tokenizer``: a folder or hub name with the model's tokenizer and chat template, which count input tokens exactly;
    None: those of OpenAI's service are counted by tiktoken.
    The prices (dollars per million tokens) are those of ``price_model``; another ``model`` has none. ``extra_body``
    goes with every request, ``length_key`` is the name it gives the most output tokens.
    """

    model: str = "gpt-4o-mini-2024-07-18"
    base_url: str | None = None
    key_variable: str | None = None
    concurrency: int = 16
    timeout: float = 600.0
    max_retries: int = 10
    price_model: str | None = "gpt-4o-mini-2024-07-18"
    price_input: float = 0.15
    price_output: float = 0.60
    tokenizer: str | None = None
    length_key: str = "max_tokens"
    extra_body: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_at_least("grader", 1, concurrency=self.concurrency)
        check_at_least("grader", 0, max_retries=self.max_retries)
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"grader.timeout: expected seconds above 0, got {self.timeout}")
        check_at_least("grader", 0, price_input=self.price_input, price_output=self.price_output)
        check_choice("grader.length_key", self.length_key, LENGTH_KEYS)

    @property
    def price(self) -> Price:
        """Returns the prices, where they are this model's."""
        if self.model != self.price_model:
            return Price(known=False)
        return Price(self.price_input, self.price_output)

    @property
    def address(self) -> str:
        """Returns where requests go."""
        return (self.base_url or os.environ.get(ADDRESS) or SERVICE).rstrip("/")

    @property
    def _endpoint(self) -> _Endpoint:
        key = self.key_variable or (KEY if self.base_url is None or self.address == SERVICE else None)
        return _Endpoint("grader", self.address, self.model, key, self.timeout, self.max_retries, self.concurrency)

    def identity(self) -> dict[str, object]:
        """Returns model, address and what goes with every request."""
        return {
            "kind": "openai",
            "model": self.model,
            "base_url": self.address,
            "extra_body": dict(self.extra_body),
        }

    def count_tokens(self, call: GradingCall) -> int | None:
        """Counts by ``tokenizer`` or tiktoken, the chat format's tokens included.

        None where the chat template refuses the call, and for a server of one's own without ``tokenizer``.
        """
        if self.tokenizer is not None:
            try:
                return len(_chat(self.tokenizer).prompt_ids(call.messages))
            except RefusedText:
                return None
        vocabulary = _vocabulary(self.model) if self.address == SERVICE else None
        if vocabulary is None:
            return None
        return BEGINS_REPLY + sum(OF_TURN + len(vocabulary.encode_ordinary(turn["content"])) for turn in call.messages)

    def check_ready(self) -> None:
        """Raises UserError without the client's packages, or without a key that is named or OpenAI's service needs."""
        self._endpoint.require_ready(self.key_variable or (KEY if self.address == SERVICE else None))

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply, as they come.

        Raises:
            UserError: what ``check_ready`` says, the endpoint refuses the key or does not know the model, or it gives
                no log-probabilities where a call needs them.
        """
        self.check_ready()
        notes: list[str] = []
        try:
            for call, found, seconds in self._endpoint.complete(calls, self._body):
                yield call, self._reply(call, found, seconds)
                if isinstance(found, Completion) and found.missing is not None and not call.top_logprobs:
                    notes.append(found.missing)
        finally:
            warn_of(self.address, notes)

    def _body(self, call: GradingCall) -> dict[str, object]:
        wanted = {"logprobs": True, "top_logprobs": call.top_logprobs} if call.top_logprobs else {}
        return {
            "model": self.model,
            "messages": list(call.messages),
            "temperature": call.temperature,
            "top_p": call.top_p,
            self.length_key: call.max_tokens,
            **wanted,
            "extra_body": dict(self.extra_body),
        }

    def _reply(self, call: GradingCall, found: Completion | _Problem, seconds: float) -> GradingReply | GradingFailure:
        """Returns what a call came back with. UserError where every call would meet the same."""
        if isinstance(found, _Problem):
            if found.param in ("logprobs", "top_logprobs"):
                raise UserError(self._without_logprobs(f"refuses them ({found.text})"))
            return GradingFailure(found.text)
        if call.top_logprobs and found.logprobs is None:
            if found.missing is None:
                raise UserError(self._without_logprobs("gives none"))
            return GradingFailure(found.missing)
        return GradingReply(
            text=found.text,
            finish_reason=found.finish_reason,
            logprobs=found.logprobs,
            input_tokens=found.input_tokens or 0,
            output_tokens=found.output_tokens or 0,
            seconds=seconds,
            model=found.model,
            estimated=found.input_tokens is None or found.output_tokens is None,
        )

    def _without_logprobs(self, what: str) -> str:
        return (
            f"this benchmark reads verdicts from log-probabilities (top_logprobs), and {redact(self.address)} with "
            f"grader.model={self.model} {what}: name an endpoint that gives them (OpenAI's, or vLLM's server), or "
            "grade on this machine with grader=local"
        )


@cache
def _chat(tokenizer: str) -> ChatFormat:
    from attnpo.models.loading import load_tokenizer

    return ChatFormat(load_tokenizer(tokenizer))


@cache
def _vocabulary(model: str) -> "tiktoken.Encoding | None":
    """Loads the vocabulary of one of OpenAI's models, which tiktoken downloads once; None where it cannot be had."""
    try:
        import tiktoken

        return tiktoken.encoding_for_model(model)
    except (ImportError, KeyError, OSError, ValueError) as problem:
        log.info("no vocabulary of grader.model=%s (%s): its input tokens are bounded, not counted", model, problem)
        return None
