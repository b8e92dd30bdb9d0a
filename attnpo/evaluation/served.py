"""Models behind OpenAI-compatible servers: the client that asks them, and what their replies hold.

Requests, back-off with jitter and ``Retry-After`` are the openai client's. A reply that is no completion (a proxy's
page, half a text) is made an error of the connection, so that the client repeats it like any other.
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

NO_KEY = "none"  # the client wants one, and would else take OPENAI_API_KEY to a server that it is not meant for
REFUSED = "the server's model refused"
CALLS = "tool calls in place of a text"
ESCAPED = "lone surrogates, which no file can hold, are written as \\u escapes"
WITHOUT_TEXT = ("length", "content_filter", "tool_calls", "function_call")  # finish reasons that explain an empty text
MOST_TOKENS = 2**53  # of a count that can be one

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Completion:
    """Server's reply to one request.

    ``missing``: why it holds no text, None where it does or where the text is just empty. ``escaped``: it had lone
    surrogates, which are written as their escapes now. A token count is None where the server gives none that can be.
    ``logprobs``: the first token's likeliest texts, None where there are none or they were not to be read.
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
    """Opens a client whose tries, ``retries`` after the first, end after ``timeout`` seconds each, whatever arrives."""
    import openai
    from httpx2 import Limits

    # A try that was given up holds its connection as long as its server sends, so that the pool has no upper bound.
    limits = Limits(max_connections=None, max_keepalive_connections=connections)
    hooks = {"response": [_refuse_other_than_completions]}
    client = openai.DefaultHttpxClient(event_hooks=hooks, limits=limits, timeout=timeout)
    client.send = _within(timeout, client.send)  # type: ignore[method-assign]
    return openai.OpenAI(api_key=key, base_url=base_url, timeout=timeout, max_retries=retries, http_client=client)


def _within(seconds: float, send: Callable[_P, "httpx2.Response"]) -> Callable[_P, "httpx2.Response"]:
    """Bounds the time of a whole reply: a read timeout begins anew with every byte that a server sends."""
    from httpx2 import ReadTimeout

    def send_in_time(*args: _P.args, **kwargs: _P.kwargs) -> "httpx2.Response":
        whole: Future[httpx2.Response] = Future()

        def work() -> None:
            try:
                whole.set_result(send(*args, **kwargs))
            except BaseException as problem:  # noqa: BLE001  raised where the reply is awaited
                whole.set_exception(problem)

        Thread(target=work, name="one try", daemon=True).start()
        try:
            return whole.result(seconds)
        except TimeoutError:
            raise ReadTimeout(f"no whole reply within {seconds:g} s") from None

    return send_in_time


def _refuse_other_than_completions(response: "httpx2.Response") -> None:
    """Raises an error of the connection for a reply that says it is a completion and is not."""
    from httpx2 import DecodingError

    if not response.is_success or response.request.url.path.endswith("/models"):
        return
    try:
        choice = json.loads(response.read())["choices"][0]
        complete = isinstance(choice["message"], dict)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        complete = False
    if not complete:
        raise DecodingError(f"no completion: {response.text[:80]!r}", request=response.request)


def read_completion(response: "httpx2.Response", logprobs: bool = False) -> Completion:
    """Reads a reply that the client let through. Raises ValueError for a part of it that is of another type."""
    body = response.json()
    choice = body["choices"][0]
    message, usage = choice["message"], body.get("usage")
    given = _text("message.content", _join(message.get("content")))
    finish_reason = escape(_text("finish_reason", choice.get("finish_reason")) or "stop")
    likely: dict[str, float] = {}
    try:
        first = ((choice.get("logprobs") or {}).get("content") or [{}])[0] if logprobs else {}
        for entry in first.get("top_logprobs") or ():
            likely.setdefault(escape(entry["token"]), entry["logprob"])  # the likeliest of those that show as one text
    except (LookupError, TypeError, AttributeError) as problem:
        raise ValueError(f"the reply's logprobs: expected texts with numbers, got {shorten(choice)}") from problem
    return Completion(
        text=escape(given),
        finish_reason=finish_reason,
        model=escape(_text("model", body.get("model"))),
        missing=None if given else _missing(message, finish_reason),
        escaped=escape(given) != given,
        input_tokens=_count(usage, "prompt_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
        logprobs=likely or None,
    )


def _missing(message: Mapping[str, Json], finish_reason: str) -> str | None:
    """Says why a message holds no text; None where the model wrote an empty one."""
    if message.get("refusal"):
        return REFUSED
    if message.get("tool_calls") or message.get("function_call"):
        return CALLS
    ended = isinstance(message.get("content"), str) and finish_reason not in WITHOUT_TEXT
    return None if ended else f"no text, finish reason {finish_reason}"


def _join(content: Json) -> Json:
    """Joins a list of text parts; anything else stays."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(content) else content


def _text(name: str, value: Json) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"the reply's {name}: expected a text, got {shorten(value)}")
    return value


def _count(usage: Json, name: str) -> int | None:
    """Returns a server's count of tokens; None unless it is a whole number of at least 0."""
    count = usage.get(name) if isinstance(usage, dict) else None
    whole = isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST_TOKENS
    return count if whole else None  # type: ignore[return-value]


def escape(text: str) -> str:
    """Writes lone surrogates as their escapes."""
    return text.encode(errors="backslashreplace").decode()


def describe(problem: Exception) -> str:
    """Says a problem in one line, with the cause of a broken connection."""
    cause = f" ({problem.__cause__})" if problem.__cause__ is not None and str(problem.__cause__) else ""
    return mask_credentials(" ".join(f"{problem}{cause}".split()))[:300]


def warn_of(address: str, notes: Iterable[str]) -> None:
    """Counts what was noted of single replies in the log."""
    for note, count in Counter(notes).items():
        log.warning("%s: %d replies: %s", redact(address), count, note)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[tuple[_Item, _Result]]:
    """Yields each item with ``function(item)``, in the order in which they are done; pulls one when a thread is free.

    The threads do not keep the process alive: an executor's would, so that Ctrl-C waited for answers.
    """
    todo: SimpleQueue[_Item | None] = SimpleQueue()
    done: SimpleQueue[tuple[_Item, Future[_Result]]] = SimpleQueue()

    def work() -> None:
        while (item := todo.get()) is not None:
            future: Future[_Result] = Future()
            try:
                future.set_result(function(item))
            except BaseException as problem:  # noqa: BLE001  raised where the results are taken
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
