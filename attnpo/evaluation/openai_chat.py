"""Answering backend and grader for OpenAI-compatible servers, such as OpenAI's own service or vLLM."""

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
    ChatModel,
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
    describe_request_error,
    log_notes,
    map_in_threads,
    open_client,
    read_completion,
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
NO_COUNT = "no token count (usage.completion_tokens), recorded as 0"
# How servers report a prompt that is too long: OpenAI's error code, and the wording of vLLM and similar servers.
TOO_LONG_CODE, TOO_LONG_WORDS = "context_length_exceeded", "maximum context length"
FILTERED = "content_filter"  # Azure's error code for a blocked prompt
OUT_OF_CREDIT = "insufficient_quota"  # OpenAI's error code for a 429 that retrying cannot fix

SERVICE = "https://api.openai.com/v1"
ADDRESS = "OPENAI_BASE_URL"  # the client's environment variable for another address
KEY = "OPENAI_API_KEY"  # the client's environment variable for the key
LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
# Tokens that OpenAI's chat format adds per turn and before the reply (OpenAI Cookbook, "How to count tokens with
# tiktoken").
OF_TURN, BEGINS_REPLY = 4, 3

_Item = TypeVar("_Item")

# ------------------------------------------------------------------------------------------------ the server


@dataclass(frozen=True)
class _FailedRequest:
    """Error for a request that failed after all retries; ``status`` is 0 unless the server returned an HTTP error."""

    text: str
    status: int = 0
    code: str | None = None
    param: str | None = None

    @property
    def is_transient(self) -> bool:
        return self.status in (0, 408, 409, 429) or self.status >= 500


@dataclass(frozen=True)
class _Endpoint:
    """Connection settings for a server.

    ``part``: config node with these settings (answering or grader), used in messages.

    ``key_variable``: environment variable with the API key; if None, no key is sent.
    """

    part: str
    address: str
    model: str
    key_variable: str | None
    timeout: float
    retries: int
    concurrency: int

    @property
    def display_address(self) -> str:
        """Returns the address without credentials, for messages."""
        return str(redact(self.address))

    def complete(
        self, items: Iterable[_Item], body_of: Callable[[_Item], Mapping[str, object]]
    ) -> Iterator[tuple[_Item, Completion | _FailedRequest, float]]:
        """Sends one request per item; yields (item, completion or error, seconds taken) in order of arrival.

        Raises:
            UserError: the server rejects the key, the model or the account, so every request would fail.
        """
        key = os.environ.get(self.key_variable or "") or NO_KEY
        client = open_client(self.address, key, self.timeout, self.retries, self.concurrency)
        retried: list[int] = []
        notes: list[str] = []

        def ask(item: _Item) -> tuple[Completion | _FailedRequest, float]:
            began = time.monotonic()
            return _send_request(client, body_of(item), retried), time.monotonic() - began

        try:
            for item, (found, seconds) in map_in_threads(ask, items, self.concurrency):
                if isinstance(found, _FailedRequest):
                    self._raise_if_permanent(client, found)
                elif found.escaped:
                    notes.append(ESCAPED)
                yield item, found, seconds
            client.close()  # not on early exit: threads may still be reading
        finally:
            log_notes(self.address, notes)
            if retried:
                text = "%s: %d calls succeeded only after retries, %d retries in total"
                log.info(text, self.display_address, len(retried), sum(retried))

    def _raise_if_permanent(self, client: "OpenAI", problem: _FailedRequest) -> None:
        """Raises an error if every other request would fail in the same way.

        Raises:
            UserError: the key, the model's name or the account is rejected; the message says what to do.
        """
        variable = self.key_variable
        if problem.status in (401, 403):
            what = "a request without a key" if variable is None else f"the key in {variable}"
            raise UserError(
                f"{self.display_address} rejected {what} ({problem.text}): put a key with access to {self.part}.model "
                f"into the environment variable {variable or f'given by {self.part}.key_variable=NAME'}"
            )
        if problem.status == 404:
            from openai import OpenAIError

            served = f"see its list at {self.display_address}/models"
            with suppress(OpenAIError, ValueError):
                served = "it serves " + ", ".join(model.id for model in client.models.list().data)
            raise UserError(
                f"{self.display_address} does not serve {self.part}.model={self.model} ({problem.text}): {served}; or "
                f"{self.part}.base_url has the wrong path (it usually ends in /v1)"
            )
        if problem.code == OUT_OF_CREDIT:
            raise UserError(
                f"{self.display_address}: the account{f' for the key in {variable}' if variable else ''} is out of "
                f"credit ({problem.text}). All replies so far are stored: add credit and run the same command again"
            )

    def require_ready(self, variable: str | None) -> None:
        """Checks that the client's packages are installed and that the key is set.

        Raises:
            UserError: a package or the environment variable ``variable`` is missing.
        """
        if find_spec("openai") is None or find_spec("httpx2") is None:
            raise UserError(
                f"{self.part}=openai needs the packages openai (3 or later) and httpx2; install the extra `eval`: "
                f"{install_command('eval')}"
            )
        if variable is not None and not os.environ.get(variable):
            raise UserError(
                f"{self.part}.key_variable={variable}: the environment variable {variable} is not set; set it to the "
                f"key for {self.display_address}, or use a server that needs no key: {self.part}.key_variable=null "
                f"{self.part}.base_url=http://HOST:PORT/v1"
            )


def _send_request(client: "OpenAI", body: Mapping[str, object], retried: list[int]) -> Completion | _FailedRequest:
    """Sends one request and returns the completion or the error; the openai client handles waiting and retries."""
    from openai import APIStatusError, OpenAIError

    try:
        raw = client.chat.completions.with_raw_response.create(**body)  # type: ignore[call-overload]
        found = read_completion(raw.http_response, logprobs="top_logprobs" in body)
    except APIStatusError as problem:
        return _FailedRequest(describe_request_error(problem), problem.status_code, problem.code, problem.param)
    except (OpenAIError, ValueError) as problem:
        return _FailedRequest(describe_request_error(problem))
    if raw.retries_taken:
        retried.append(raw.retries_taken)
    return found


# ------------------------------------------------------------------------------------------------ answers


@dataclass(frozen=True)
class OpenAIAnswering:
    """Answering backend for a server with OpenAI's chat completions API.

    ``base_url`` usually ends in /v1. ``model``: the model's name on the server (None: ``model.path``, as with vLLM).
    ``key_variable``: environment variable with the API key (None: no key). Up to ``concurrency`` requests run at a
    time; each may take ``timeout`` seconds and is retried up to ``retries`` times with back-off. ``extensions``: also
    send options that vLLM accepts but OpenAI rejects: top_k, stop_token_ids, and neutral values for options that a
    folder's generation config would otherwise set. ``max_length``: maximum number of tokens in prompt and answer (None:
    the model's number of positions, or the server's limit).
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
                f"answering.base_url={self.base_url} is not a server address; expected e.g. http://localhost:8000/v1"
            )

    def open(self, model: ModelSpec, device: torch.device) -> ChatModel:
        """Reads the model's folder if ``model.path`` is a local folder, without contacting the server.

        Raises:
            UserError: the package openai or the key in ``key_variable`` is missing, or ``model.fold_system`` is set.
        """
        from attnpo.models.generate import max_sequence_length

        self.endpoint(self.model or model.path).require_ready(self.key_variable)
        if model.fold_system:
            raise UserError(
                "model.fold_system=true has no effect on a server, which renders its own chat template: remove it, and "
                "serve a folder whose template folds the system turn (exports of runs with this option do)"
            )
        if not Path(model.path).expanduser().is_dir():
            log.info("%s is not a local folder, so the weights are identified by the name on the server", model.path)
            return ServedChatModel(self, model, None, self.max_length)
        spec, chat = describe_model(model)
        limit = max_sequence_length(spec.path, spec.revision, "answering.max_length", self.max_length)
        return ServedChatModel(self, spec, chat, limit)

    def endpoint(self, model: str) -> _Endpoint:
        """Returns the connection settings for ``model``."""
        return _Endpoint(
            "answering", self.base_url, model, self.key_variable, self.timeout, self.retries, self.concurrency
        )


@dataclass
class ServedChatModel:
    """Chat model on a server; ``chat`` is None unless ``model.path`` is a local folder."""

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
        """Returns the model's name with a note that the server counts the tokens."""
        return f"{self.name} (the server's usage)"

    def key(self) -> dict[str, object]:
        """Returns fingerprints of the local weights and chat format, or the model's name on the server."""
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
        """Builds the body of a request.

        The seed is derived from the sampling seed, the conversation and the draw. With a shared seed, a server would
        use the same random numbers for all answers, which would make them correlated.

        Raises:
            UserError: a setting can only be sent with ``extensions``.
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
                "model.chat_template_kwargs cannot be sent to the server with answering.extensions=false: remove them, "
                "or set answering.extensions=true"
            )
        elif sampling.top_k or sampling.stop_ids:
            raise UserError(
                f"sampling.top_k={sampling.top_k} and sampling.stop_ids={list(sampling.stop_ids)} cannot be sent with "
                "answering.extensions=false: set them to 0 and [], or set answering.extensions=true"
            )
        return body

    def answer(self, asked: Sequence[ChatRequest], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Yields replies one at a time. Stops after ``concurrency`` consecutive failures.

        Raises:
            UserError: the server rejects the key, model name or parameters (at once), or some requests still failed
                after all retries (at the end).
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
                if isinstance(found, _FailedRequest) and found.is_transient:
                    in_a_row += 1
                    problems.append(found.text)
                    if in_a_row >= self.settings.concurrency:
                        break
                    continue
                in_a_row = 0
                if isinstance(found, _FailedRequest):
                    yield {index: self._make_refused_reply(found)}
                    continue
                notes += [NO_COUNT] * (found.output_tokens is None)
                yield {index: Reply(found.text, found.output_tokens or 0, found.finish_reason, found.missing)}
        finally:
            log_notes(self.settings.base_url, notes)
        if problems:
            rest = "" if done == len(asked) else f"; the other {len(asked) - done} were not sent"
            raise UserError(
                f"the server at answering.base_url={redact(self.settings.base_url)} did not answer {len(problems)} of "
                f"{done} conversations{rest}. First error: {problems[0]}. All answers so far are stored: run the "
                "command again to continue"
            )

    def _make_refused_reply(self, problem: _FailedRequest) -> Reply:
        """Builds an empty reply for a prompt that is too long or filtered.

        Raises:
            UserError: the server rejected the request for another reason, such as its parameters.
        """
        if problem.code == TOO_LONG_CODE or TOO_LONG_WORDS in problem.text:
            return Reply("", 0, LENGTH, refused=TOO_LONG)
        if problem.code == FILTERED:
            return Reply("", 0, FILTERED, refused="filtered by the server")
        help_ = "this is the server's own message"
        if self.settings.extensions:
            help_ = "if the server does not support top_k and stop_token_ids, set answering.extensions=false"
        raise UserError(
            f"the server at answering.base_url={redact(self.settings.base_url)} rejected a request for the model "
            f"{self.name!r} with status {problem.status}: {problem.text}; {help_}"
        )


# ------------------------------------------------------------------------------------------------ grades


@dataclass(frozen=True)
class OpenAIGrader:
    """Grader on an OpenAI-compatible server.

    ``base_url``: address (None: ``OPENAI_BASE_URL`` if set, or else OpenAI's service). ``key_variable``: environment
    variable with the API key (None: ``OPENAI_API_KEY``, or no key if ``base_url`` is set). Up to ``concurrency`` calls
    run at a time. Each attempt may take ``timeout`` seconds and is retried up to ``max_retries`` times, unless the
    server asks for a wait of more than two minutes. ``tokenizer``: folder or hub name with the model's tokenizer and
    chat template, for exact input token counts (None: tiktoken, for OpenAI's service only). The prices, in dollars per
    million tokens, apply only to ``price_model``; for any other ``model``, the price is unknown. ``extra_body`` is
    added to every request. ``length_key``: name of the parameter that limits output tokens.
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
            raise UserError(f"grader.timeout must be a positive number of seconds, got {self.timeout}")
        check_at_least("grader", 0, price_input=self.price_input, price_output=self.price_output)
        check_choice("grader.length_key", self.length_key, LENGTH_KEYS)

    @property
    def price(self) -> Price:
        """Returns the configured price if ``price_model`` is this model; otherwise returns an unknown price."""
        if self.model != self.price_model:
            return Price(known=False)
        return Price(self.price_input, self.price_output)

    @property
    def address(self) -> str:
        """Returns the address that requests are sent to."""
        return (self.base_url or os.environ.get(ADDRESS) or SERVICE).rstrip("/")

    @property
    def _endpoint(self) -> _Endpoint:
        key = self.key_variable or (KEY if self.base_url is None or self.address == SERVICE else None)
        return _Endpoint("grader", self.address, self.model, key, self.timeout, self.max_retries, self.concurrency)

    def identity(self) -> dict[str, object]:
        """Returns model, address and extra request parameters."""
        return {
            "kind": "openai",
            "model": self.model,
            "base_url": self.address,
            "extra_body": dict(self.extra_body),
        }

    def count_tokens(self, call: GradingCall) -> int | None:
        """Counts tokens with ``tokenizer`` or tiktoken, including those that the chat format adds.

        Returns None if the chat template rejects the call, or for a custom server without ``tokenizer``.
        """
        if self.tokenizer is not None:
            try:
                return len(_load_chat(self.tokenizer).prompt_ids(call.messages))
            except RefusedText:
                return None
        vocabulary = _load_vocabulary(self.model) if self.address == SERVICE else None
        if vocabulary is None:
            return None
        return BEGINS_REPLY + sum(OF_TURN + len(vocabulary.encode_ordinary(turn["content"])) for turn in call.messages)

    def check_ready(self) -> None:
        """Checks that the client's packages and the required key are available.

        Raises:
            UserError: one of them is missing.
        """
        self._endpoint.require_ready(self.key_variable or (KEY if self.address == SERVICE else None))

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply as replies arrive.

        Raises:
            UserError: see ``check_ready``; also if the server rejects the key, does not know the model, or returns no
                log-probabilities for a call that needs them.
        """
        self.check_ready()
        notes: list[str] = []
        try:
            for call, found, seconds in self._endpoint.complete(calls, self._request_body):
                yield call, self._make_reply(call, found, seconds)
                if isinstance(found, Completion) and found.missing is not None and not call.top_logprobs:
                    notes.append(found.missing)
        finally:
            log_notes(self.address, notes)

    def _request_body(self, call: GradingCall) -> dict[str, object]:
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

    def _make_reply(
        self, call: GradingCall, found: Completion | _FailedRequest, seconds: float
    ) -> GradingReply | GradingFailure:
        """Converts a completion or an error to the call's reply.

        Raises:
            UserError: the server does not return log-probabilities, which every call would need.
        """
        if isinstance(found, _FailedRequest):
            if found.param in ("logprobs", "top_logprobs"):
                raise UserError(self._describe_missing_logprobs(f"rejects them ({found.text})"))
            return GradingFailure(found.text)
        if call.top_logprobs and found.logprobs is None:
            if found.missing is None:
                raise UserError(self._describe_missing_logprobs("returns none"))
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

    def _describe_missing_logprobs(self, what: str) -> str:
        return (
            f"this benchmark reads verdicts from log-probabilities (top_logprobs), but {redact(self.address)} with "
            f"grader.model={self.model} {what}: use a server that returns them (OpenAI's, or vLLM's), or grade locally "
            "with grader=local"
        )


@cache
def _load_chat(tokenizer: str) -> ChatFormat:
    from attnpo.models.loading import load_tokenizer

    return ChatFormat(load_tokenizer(tokenizer))


@cache
def _load_vocabulary(model: str) -> "tiktoken.Encoding | None":
    """Loads the vocabulary of an OpenAI model, which tiktoken downloads once; returns None if that fails."""
    try:
        import tiktoken

        return tiktoken.encoding_for_model(model)
    except (ImportError, KeyError, OSError, ValueError) as problem:
        log.info(
            "cannot load a vocabulary for grader.model=%s (%s): using an upper bound instead of input token counts",
            *(model, problem),
        )
        return None
