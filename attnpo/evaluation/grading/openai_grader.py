"""Grades with a model served at an OpenAI-compatible address: OpenAI's own service, or a model served elsewhere."""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from attnpo.evaluation.grading.base import GradingCall, GradingFailure, GradingReply, Price
from attnpo.models.served import ESCAPED, NO_KEY, describe, open_client, read_completion, warn_of
from attnpo.schema import UserError, check_choice, check_least
from attnpo.system.credentials import redact
from attnpo.system.packages import install_line
from attnpo.system.threads import in_threads
from attnpo.text.chat import ChatFormat, RefusedText

if TYPE_CHECKING:
    import openai
    import tiktoken
    from openai.types.chat import ChatCompletionMessageParam

log = logging.getLogger(__name__)

SERVICE = "https://api.openai.com/v1"
ADDRESS = "OPENAI_BASE_URL"  # the client's own variable for another address
KEY = "OPENAI_API_KEY"  # the client's own variable for the key, of its own address or of that
LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
# Tokens of OpenAI's chat format: around a turn with its role, and ahead of the reply (OpenAI Cookbook, "How to count
# tokens with tiktoken").
OF_TURN, BEGINS_REPLY = 4, 3
OUT_OF_CREDIT = "insufficient_quota"  # OpenAI's code of a 429 that no waiting mends


@dataclass(frozen=True)
class OpenAIGrader:
    """A model that an OpenAI-compatible endpoint serves.

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
        check_least("grader", 1, concurrency=self.concurrency)
        check_least("grader", 0, max_retries=self.max_retries)
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"grader.timeout: expected seconds above 0, got {self.timeout}")
        check_least("grader", 0, price_input=self.price_input, price_output=self.price_output)
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
    def _place(self) -> str:
        """Returns the address for readers."""
        return str(redact(self.address))

    @property
    def _key(self) -> str | None:
        """Name of the environment variable with the key; None for a server that is sent none."""
        return self.key_variable or (KEY if self.base_url is None or self.address == SERVICE else None)

    def identity(self) -> dict[str, object]:
        """Model, address and what goes with every request."""
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
        """Raises UserError without the client's package, or without a key for OpenAI's service."""
        if find_spec("openai") is None or find_spec("httpx2") is None:
            raise UserError(
                "grader=openai needs the packages openai (3 or later) and httpx2; they come with the extra `eval`: "
                f"{install_line('eval')}"
            )
        if self.address == SERVICE and not os.environ.get(self._key or ""):
            raise UserError(
                f"grader=openai asks {SERVICE}, which needs a key: expected it in the environment variable "
                f"{self._key} (grader.key_variable), which is not set; or name a server of your own with "
                "grader.base_url=http://HOST:PORT/v1"
            )
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise UserError(
                f"grader.key_variable={self.key_variable}: expected the server's key in the environment variable "
                f"{self.key_variable}, which is not set; set it, or grader.key_variable=null where a server asks for "
                "none"
            )

    def ask(self, calls: Iterable[GradingCall]) -> Iterator[tuple[GradingCall, GradingReply | GradingFailure]]:
        """Yields each call with its reply, as they come.

        Raises:
            UserError: what ``check_ready`` says, the endpoint refuses the key or does not know the model, or it gives
                no log-probabilities where a call needs them.
        """
        self.check_ready()
        key = os.environ.get(self._key or "") or NO_KEY
        client = open_client(self.address, key, self.timeout, self.max_retries, self.concurrency)
        retried: list[int] = []
        notes: list[str] = []
        try:
            yield from in_threads(lambda call: self._reply(client, call, retried, notes), calls, self.concurrency)
            client.close()  # not where this is left early: threads may still be reading
        finally:
            warn_of(self.address, notes)
            if retried:
                log.info(
                    "%s: %d of the calls were answered after repeating them, %d times in all",
                    self._place,
                    len(retried),
                    sum(retried),
                )

    def _reply(
        self, client: "openai.OpenAI", call: GradingCall, retried: list[int], notes: list[str]
    ) -> GradingReply | GradingFailure:
        """Returns what the endpoint says to one call. UserError for what no other call would fare better with."""
        import openai

        began = time.monotonic()
        wanted = {"logprobs": True, "top_logprobs": call.top_logprobs} if call.top_logprobs else {}
        try:
            raw = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=cast("list[ChatCompletionMessageParam]", list(call.messages)),
                temperature=call.temperature,
                top_p=call.top_p,
                extra_body={self.length_key: call.max_tokens, **wanted, **self.extra_body},
            )
            found = read_completion(raw.http_response, logprobs=call.top_logprobs > 0)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as problem:
            what = "a request without a key" if self._key is None else f"the key in {self._key}"
            raise UserError(
                f"{self._place} refuses {what} ({describe(problem)}): expected a key that may use grader.model in the "
                f"environment variable {self._key or 'that grader.key_variable=NAME names'}"
            ) from problem
        except openai.NotFoundError as problem:
            raise UserError(
                f"{self._place} does not serve grader.model={self.model} ({describe(problem)}): see its list at "
                f"{self._place}/models, and that grader.base_url ends as the server wants it (mostly /v1)"
            ) from problem
        except openai.APIStatusError as problem:
            self._check_mendable(problem)
            return GradingFailure(describe(problem))
        except (openai.APIError, ValueError) as problem:
            return GradingFailure(describe(problem))
        if raw.retries_taken:
            retried.append(raw.retries_taken)
        if call.top_logprobs and found.logprobs is None:
            if found.missing is not None:
                return GradingFailure(found.missing)
            raise UserError(self._without_logprobs("gives none"))
        if found.missing is not None and found.logprobs is None:
            notes.append(found.missing)
        if found.escaped:
            notes.append(ESCAPED)
        return GradingReply(
            text=found.text,
            finish_reason=found.finish_reason,
            logprobs=found.logprobs,
            input_tokens=found.input_tokens or 0,
            output_tokens=found.output_tokens or 0,
            seconds=time.monotonic() - began,
            model=found.model,
            estimated=found.input_tokens is None or found.output_tokens is None,
        )

    def _check_mendable(self, problem: "openai.APIStatusError") -> None:
        """Raises UserError for a refusal that every call would meet."""
        if problem.code == OUT_OF_CREDIT:
            raise UserError(
                f"{self._place}: the account{f' of the key in {self._key}' if self._key else ''} is out of credit "
                f"({describe(problem)}); the replies so far are stored, the same command goes on from there"
            ) from problem
        if problem.param in ("logprobs", "top_logprobs"):
            raise UserError(self._without_logprobs(f"refuses them ({describe(problem)})")) from problem

    def _without_logprobs(self, what: str) -> str:
        return (
            f"this benchmark reads verdicts from log-probabilities (top_logprobs), and {self._place} with "
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
