"""Answers from an OpenAI-compatible server, for example vLLM with an exported folder."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attnpo.evaluation.answers.base import LENGTH, Answerer, Asked, Reply
from attnpo.models.served import ESCAPED, NO_KEY, describe, open_client, read_completion, warn_of
from attnpo.models.spec import ModelSpec
from attnpo.schema import BOOKKEEPING, Sampling, UserError, check_least, digest
from attnpo.system.credentials import redact
from attnpo.system.packages import install_line
from attnpo.system.threads import in_threads
from attnpo.text.chat import ChatFormat
from attnpo.text.template import tools_of, without_tools

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

log = logging.getLogger(__name__)

TOO_LONG = "too long for the server"
NO_COUNT = "no count of their tokens (usage.completion_tokens), which are written as 0"
# What servers say of a prompt that is too long: OpenAI's code, and the words of vLLM and of those that follow it.
TOO_LONG_CODE, TOO_LONG_WORDS = "context_length_exceeded", "maximum context length"
FILTERED = "content_filter"  # Azure's code for a prompt that it does not pass on


@dataclass(frozen=True)
class OpenAIAnswering:
    """A server that speaks OpenAI's chat completions.

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
        check_least("answering", 1, concurrency=self.concurrency, timeout=self.timeout, max_length=self.max_length)
        check_least("answering", 0, retries=self.retries)
        if not self.base_url.startswith(("http://", "https://")):
            raise UserError(
                f"answering.base_url={self.base_url}: expected the address of a server, such as "
                "http://localhost:8000/v1"
            )

    def open(self, model: ModelSpec, device: torch.device) -> Answerer:
        """Reads the folder that is served, where ``model.path`` is one here; the server is not asked yet.

        UserError without the package openai, or without the key that ``key_variable`` promises.
        """
        from attnpo.evaluation.answers.answering import described
        from attnpo.models.generate import longest_sequence

        key = self._key()
        _require_package()
        if model.fold_system:
            raise UserError(
                "model.fold_system=true cannot reach a server, which renders its own chat template: leave it out and "
                "serve a folder whose template folds the system turn (what a run with this option exports does)"
            )
        if not Path(model.path).expanduser().is_dir():
            log.info("%s is no folder here: its name on the server stands for its weights", model.path)
            return ServedAnswerer(self, model, None, self.max_length, key)
        spec, chat = described(model)
        limit = longest_sequence(spec.path, spec.revision, "answering.max_length", self.max_length)
        return ServedAnswerer(self, spec, chat, limit, key)

    def _key(self) -> str:
        if self.key_variable is None:
            return NO_KEY
        key = os.environ.get(self.key_variable)
        if not key:
            raise UserError(
                f"answering.key_variable={self.key_variable}: expected the server's key in the environment variable "
                f"{self.key_variable}, which is not set; set it, or answering.key_variable=null for a server that asks "
                "for none"
            )
        return key


def _require_package() -> None:
    try:
        import openai  # noqa: F401
    except ImportError as problem:
        raise UserError(
            f"answering=openai needs the package openai, which comes with the extra `eval`: {install_line('eval')}"
        ) from problem


class ServedAnswerer:
    """A served model. ``chat`` is None where ``model.path`` is no folder on this machine."""

    def __init__(
        self, settings: OpenAIAnswering, model: ModelSpec, chat: ChatFormat | None, limit: int | None, key: str
    ) -> None:
        self.settings, self.model, self.chat, self.limit = settings, model, chat, limit
        self.name = settings.model or model.path
        self._secret = key

    @property
    def counted_by(self) -> str:
        """Returns the server, whose ``usage`` it is."""
        return f"{self.name} (the server's usage)"

    def key(self) -> dict[str, object]:
        """Weights and chat format of the folder, or the name on the server. The address is none of it."""
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

    def parameters(self, one: Asked, sampling: Sampling) -> dict[str, object]:
        """Returns the body of a request. The seed follows from that of the sampling, the conversation and the draw.

        A server draws the same random numbers for the same seed: one seed for all would tie the answers to each other.

        UserError for settings that only ``extensions`` can send.
        """
        seed = int(digest([sampling.seed, list(one.messages), one.draw])[:8], 16) >> 1  # 31 bits fit everywhere
        tools = tools_of(one.messages)
        body = {
            "model": self.name,
            "messages": without_tools(one.messages),
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
            kwargs = self.model.chat_template_kwargs
            body["extra_body"] = (
                neutral
                | ({"stop_token_ids": sorted(ends)} if ends else {})
                | ({"chat_template_kwargs": dict(kwargs)} if kwargs else {})
            )
        elif self.model.chat_template_kwargs:
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

    def answer(self, asked: Sequence[Asked], sampling: Sampling) -> Iterator[Mapping[int, Reply]]:
        """Replies one by one. UserError, last, for what the server gave no answer to after all retries.

        A server that has failed ``concurrency`` times in a row is asked no more, one that refuses (key, name of the
        model, parameters) at once.
        """
        if not asked:
            return
        bodies = [self.parameters(one, sampling) for one in asked]
        settings = self.settings
        problems: list[str] = []
        notes: list[str] = []
        client = open_client(settings.base_url, self._secret, settings.timeout, settings.retries, settings.concurrency)
        in_a_row = done = 0
        replies = in_threads(lambda at: _ask(client, bodies[at], notes), range(len(bodies)), settings.concurrency)
        try:
            for index, reply in replies:
                done += 1
                if isinstance(reply, Reply):
                    in_a_row = 0
                    yield {index: reply}
                elif isinstance(reply, _Refusal):
                    raise self._refused(client, reply)
                else:
                    in_a_row += 1
                    problems.append(str(reply))
                    if in_a_row >= settings.concurrency:
                        break
            else:
                client.close()  # not where this is left early: threads may still be reading
        finally:
            warn_of(settings.base_url, notes)
        if problems:
            rest = "" if done == len(asked) else f", and was then not asked for {len(asked) - done} more"
            raise UserError(
                f"the server at answering.base_url={redact(settings.base_url)} did not answer {len(problems)} of "
                f"{done} conversations{rest}; the first: {problems[0]}. What it answered is kept: give the command "
                "again"
            )

    def _refused(self, client: "OpenAI", refusal: "_Refusal") -> UserError:
        """Returns the error for a request that would be refused again, with what can be done about it."""
        from openai import OpenAIError

        help_ = "the text above is the server's own"
        if refusal.status in (401, 403):
            variable = self.settings.key_variable
            help_ = "name the environment variable that holds its key as answering.key_variable"
            help_ = help_ if variable is None else f"the key in {variable} (answering.key_variable) is not one it takes"
        elif refusal.status == 404:
            served = ""
            with suppress(OpenAIError, ValueError):
                served = ": " + ", ".join(model.id for model in client.models.list().data)
            help_ = f"set answering.model to the name of a model that it serves{served}; or the address is wrong"
        elif self.settings.extensions:
            help_ = "a server that does not know top_k and stop_token_ids needs answering.extensions=false"
        return UserError(
            f"the server at answering.base_url={redact(self.settings.base_url)} refused a request for the model "
            f"{self.name!r} with status {refusal.status}: {refusal.text}; {help_}"
        )


# ------------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True)
class _Refusal:
    """A status that the same request would get again, and the server's words."""

    status: int
    text: str


@dataclass(frozen=True)
class _Failure:
    """Why a request got no answer after the client's retries."""

    text: str

    def __str__(self) -> str:
        return self.text


_Outcome = Reply | _Refusal | _Failure


def _ask(client: "OpenAI", body: Mapping[str, object], notes: list[str]) -> _Outcome:
    """Returns the reply to one request; the client waits and tries again by itself."""
    from openai import APIStatusError, OpenAIError

    try:
        raw = client.chat.completions.with_raw_response.create(**body)  # type: ignore[call-overload]
        found = read_completion(raw.http_response)
    except APIStatusError as problem:
        return _of_status(problem)
    except (OpenAIError, ValueError) as problem:
        return _Failure(describe(problem))
    notes += ([ESCAPED] * found.escaped) + ([NO_COUNT] * (found.output_tokens is None))
    return Reply(found.text, found.output_tokens or 0, found.finish_reason, refused=found.missing)


def _of_status(problem: "APIStatusError") -> _Outcome:
    text = describe(problem)
    if problem.status_code in (408, 409, 429) or problem.status_code >= 500:
        return _Failure(text)
    if problem.code == TOO_LONG_CODE or TOO_LONG_WORDS in text:
        return Reply("", 0, LENGTH, refused=TOO_LONG)
    if problem.code == FILTERED:
        return Reply("", 0, FILTERED, refused="filtered by the server")
    return _Refusal(problem.status_code, text)
