"""Client for OpenAI-compatible servers, and parsing of their replies.

The openai client handles requests, back-off with jitter and ``Retry-After``. A reply that is not a completion (a
proxy's page, a truncated body) is turned into a connection error, so that the client retries it.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from attnpo.system.credentials import mask_credentials, redact
from attnpo.system.files import Json, shorten

if TYPE_CHECKING:
    import httpx2
    import openai

log = logging.getLogger(__name__)

NO_KEY = "none"  # the client requires a key, and would otherwise send OPENAI_API_KEY to any server
REFUSED = "the server's model refused"
CALLS = "tool calls in place of a text"
ESCAPED = "lone surrogates, which cannot be stored, were replaced by \\u escapes"
WITHOUT_TEXT = ("length", "content_filter", "tool_calls", "function_call")  # finish reasons that explain an empty text
MOST_TOKENS = 2**53  # larger token counts are invalid

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Completion:
    """Parsed server reply to one request.

    ``missing``: reason why there is no text; None if there is text, or if the model generated an empty string.
    ``escaped``: True if lone surrogates were replaced with escape sequences. Token counts are None if the server
    reports no valid ones. ``logprobs``: log-probabilities of the most likely first tokens; None if there are none or
    they were not requested.
    """

    text: str
    finish_reason: str
    model: str
    missing: str | None
    escaped: bool
    input_tokens: int | None
    output_tokens: int | None
    logprobs: dict[str, float] | None


def open_client(base_url: str, key: str, timeout: float, retries: int, connections: int) -> "openai.OpenAI":
    """Opens a client that retries up to ``retries`` times and aborts each attempt after ``timeout`` seconds."""
    import openai
    from httpx2 import Limits

    # An abandoned attempt keeps its connection while its server sends, so the pool has no upper limit.
    limits = Limits(max_connections=None, max_keepalive_connections=connections)
    hooks = {"response": [_reject_non_completions]}
    client = openai.DefaultHttpxClient(event_hooks=hooks, limits=limits, timeout=timeout)
    client.send = _limit_total_time(timeout, client.send)  # type: ignore[method-assign]
    return openai.OpenAI(api_key=key, base_url=base_url, timeout=timeout, max_retries=retries, http_client=client)


def _limit_total_time(seconds: float, send: Callable[_P, "httpx2.Response"]) -> Callable[_P, "httpx2.Response"]:
    """Limits the total time for a reply, because a read timeout restarts with each byte received."""
    from httpx2 import ReadTimeout

    def send_in_time(*args: _P.args, **kwargs: _P.kwargs) -> "httpx2.Response":
        whole: Future[httpx2.Response] = Future()

        def work() -> None:
            try:
                whole.set_result(send(*args, **kwargs))
            except BaseException as problem:  # noqa: BLE001  raised again in the waiting thread
                whole.set_exception(problem)

        Thread(target=work, name="one try", daemon=True).start()
        try:
            return whole.result(seconds)
        except TimeoutError:
            raise ReadTimeout(f"no complete reply within {seconds:g} s") from None

    return send_in_time


def _reject_non_completions(response: "httpx2.Response") -> None:
    """Raises a connection error for a successful response that is not a completion."""
    from httpx2 import DecodingError

    if not response.is_success or response.request.url.path.endswith("/models"):
        return
    try:
        choice = json.loads(response.read())["choices"][0]
        complete = isinstance(choice["message"], dict)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        complete = False
    if not complete:
        raise DecodingError(f"not a completion: {response.text[:80]!r}", request=response.request)


def read_completion(response: "httpx2.Response", logprobs: bool = False) -> Completion:
    """Parses a reply.

    Raises:
        ValueError: a field has the wrong type.
    """
    body = response.json()
    choice = body["choices"][0]
    message, usage = choice["message"], body.get("usage")
    given = _check_text("message.content", _join_text_parts(message.get("content")))
    finish_reason = escape_surrogates(_check_text("finish_reason", choice.get("finish_reason")) or "stop")
    likely: dict[str, float] = {}
    try:
        first = ((choice.get("logprobs") or {}).get("content") or [{}])[0] if logprobs else {}
        for entry in first.get("top_logprobs") or ():
            # Keeps the most likely of tokens with the same text.
            likely.setdefault(escape_surrogates(entry["token"]), entry["logprob"])
    except (LookupError, TypeError, AttributeError) as problem:
        raise ValueError(f"the reply's logprobs must pair strings with numbers, got {shorten(choice)}") from problem
    return Completion(
        text=escape_surrogates(given),
        finish_reason=finish_reason,
        model=escape_surrogates(_check_text("model", body.get("model"))),
        missing=None if given else _explain_missing_text(message, finish_reason),
        escaped=escape_surrogates(given) != given,
        input_tokens=_read_token_count(usage, "prompt_tokens"),
        output_tokens=_read_token_count(usage, "completion_tokens"),
        logprobs=likely or None,
    )


def _explain_missing_text(message: Mapping[str, Json], finish_reason: str) -> str | None:
    """Returns the reason why a message has no text; None if the model generated an empty string."""
    if message.get("refusal"):
        return REFUSED
    if message.get("tool_calls") or message.get("function_call"):
        return CALLS
    ended = isinstance(message.get("content"), str) and finish_reason not in WITHOUT_TEXT
    return None if ended else f"no text, finish reason {finish_reason}"


def _join_text_parts(content: Json) -> Json:
    """Joins a list of text parts; returns anything else unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(content) else content


def _check_text(name: str, value: Json) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"the reply's {name} must be a string, got {shorten(value)}")
    return value


def _read_token_count(usage: Json, name: str) -> int | None:
    """Returns a token count reported by the server; None unless it is a non-negative integer."""
    count = usage.get(name) if isinstance(usage, dict) else None
    whole = isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST_TOKENS
    return count if whole else None  # type: ignore[return-value]


def escape_surrogates(text: str) -> str:
    """Replaces lone surrogates with escape sequences."""
    return text.encode(errors="backslashreplace").decode()


def describe_request_error(problem: Exception) -> str:
    """Describes an error in one line, including the cause of a connection error."""
    cause = f" ({problem.__cause__})" if problem.__cause__ is not None and str(problem.__cause__) else ""
    return mask_credentials(" ".join(f"{problem}{cause}".split()))[:300]


def log_notes(address: str, notes: Iterable[str]) -> None:
    """Logs one warning per distinct note on a reply, with the number of replies it applies to."""
    for note, count in Counter(notes).items():
        log.warning("%s: %d replies: %s", redact(address), count, note)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[tuple[_Item, _Result]]:
    """Yields each item with ``function(item)`` in order of completion; pulls an item only when a thread is free.

    Unlike an executor's threads, these are daemon threads, so Ctrl-C does not wait for pending replies.
    """
    todo: SimpleQueue[_Item | None] = SimpleQueue()
    done: SimpleQueue[tuple[_Item, Future[_Result]]] = SimpleQueue()

    def work() -> None:
        while (item := todo.get()) is not None:
            future: Future[_Result] = Future()
            try:
                future.set_result(function(item))
            except BaseException as problem:  # noqa: BLE001  raised again when the result is read
                future.set_exception(problem)
            done.put((item, future))

    pulled = iter(items)
    started = flying = 0
    try:
        while True:
            while flying < workers and (item := next(pulled, None)) is not None:
                flying += 1
                if flying > started:
                    started += 1
                    threading.Thread(target=work, name=f"call {started}", daemon=True).start()
                todo.put(item)
            if not flying:
                return
            item, future = done.get()
            flying -= 1
            yield item, future.result()
    finally:
        for _ in range(started):
            todo.put(None)
