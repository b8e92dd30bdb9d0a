"""A server on this machine that answers like an OpenAI-compatible endpoint, and fails as a test tells it to.

    with Loopback(lambda body: "Rating: [[7]]", faults=[None, Fault(429, retry_after=0.1)]) as server:
        ...  # base_url=server.base_url; server.requests afterwards

It serves ``/v1/chat/completions`` and ``/v1/models``. A token is a run of non-blanks with the blanks before it; a reply
longer than ``max_tokens`` of the request is cut there.
"""

import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from attnpo.schema import digest

Body = dict[str, Any]
MODEL = "loop-back-model"
DROP = 0.05  # seconds between two bytes of a server that drips


@dataclass(frozen=True)
class Reply:
    """What the server says: ``logprobs`` of the first token's texts, None for an endpoint that gives none.

    ``model``: the model it says it is, None the one asked for.
    ``usage``: its account of the tokens in place of a true one. ``choice`` and ``message``: what else stands there, in
    place of its own where that has the name.
    """

    text: str
    finish_reason: str = "stop"
    logprobs: Mapping[str, float] | None = None
    model: object = None
    usage: object = ...
    choice: Mapping[str, object] = field(default_factory=dict)
    message: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """What befalls one request: another status, with ``Retry-After`` in seconds, or one of the words in ``what``.

    ``code`` and ``param`` stand in the JSON of the error. ``what``: drop (the connection is closed without an answer),
    garbage (200, but no JSON), cut (half of the JSON), odd (JSON of another form), slow (a whole answer, ``seconds``
    late; any fault may be late), drip (a whole answer behind blanks that come one by one for ``seconds``), drip headers
    (the same within its headers).
    """

    status: int = 200
    what: str = ""
    retry_after: float | None = None
    seconds: float = 0.0
    message: str = "injected"
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Request:
    """A request that came: when, what, and whether it got a whole answer. ``digest`` is that of its messages."""

    path: str
    body: Body
    digest: str
    began: float
    headers: Mapping[str, str]
    fault: Fault | None


@dataclass
class Loopback:
    """An endpoint on 127.0.0.1 while the context is open.

    ``reply`` gets the body of a request and gives a text or a ``Reply``; it is called in several threads. Each request
    takes the next of ``faults`` (None: no fault), those after the last are answered. ``key``: the only key that is not
    answered with 401. ``input_tokens`` counts the tokens of a request.

    ``requests`` are all that came, ``answered`` counts whole answers by the digest of the messages, ``at_once`` is the
    most requests that were open at the same time.
    """

    reply: Callable[[Body], str | Reply]
    faults: Iterable[Fault | None] = ()
    key: str | None = None
    input_tokens: Callable[[Body], int] = lambda body: sum(
        4 + len(pieces(message["content"])) for message in body["messages"]
    )
    requests: list[Request] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    at_once: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._faults: Iterator[Fault | None] = iter(self.faults)
        self._lock = threading.Lock()
        self._open = 0

    @property
    def base_url(self) -> str:
        """The address that clients take, with its /v1."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Loopback":
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if error is None and self.problems:
            raise AssertionError(f"the server failed: {self.problems}")

    # ------------------------------------------------------------------------------------------ one request

    def _take(self, path: str, body: Body, headers: Mapping[str, str]) -> Request:
        with self._lock:
            fault = next(self._faults, None)
            request = Request(path, body, digest(body["messages"]), time.monotonic(), headers, fault)
            self.requests.append(request)
            self._open += 1
            self.at_once = max(self.at_once, self._open)
        return request

    def _close(self) -> None:
        with self._lock:
            self._open -= 1

    def _leave(self, request: Request, whole: bool) -> None:
        with self._lock:
            self.answered[request.digest] += whole

    def _completion(self, body: Body) -> Body:
        given = self.reply(body)
        reply = given if isinstance(given, Reply) else Reply(given)
        found = pieces(reply.text)
        most = body.get("max_tokens") or body.get("max_completion_tokens") or math.inf
        cut = len(found) > most
        kept = found[: int(most)] if cut else found
        text = "".join(kept) if cut else reply.text
        before = self.input_tokens(body)
        after = len(kept)
        content = _logprobs(kept, reply.logprobs, body.get("top_logprobs", 0)) if body.get("logprobs") else None
        return {
            "id": "chatcmpl-loop-back",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": reply.model or body["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None, **reply.message},
                    "finish_reason": "length" if cut else reply.finish_reason,
                    "logprobs": content,
                    **reply.choice,
                }
            ],
            "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}
            if reply.usage is ...
            else reply.usage,
        }


def pieces(text: str) -> list[str]:
    """The server's tokens of a text."""
    return re.findall(r"\s*\S+", text)


def _logprobs(tokens: list[str], given: Mapping[str, float] | None, top: int) -> Body | None:
    if given is None:
        return None
    ranked = sorted(given.items(), key=lambda item: -item[1])[:top]
    likely = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in ranked]
    first = tokens[0] if tokens else ""
    entry = {"token": first, "logprob": given.get(first, -9.0), "bytes": list(first.encode()), "top_logprobs": likely}
    return {"content": [entry], "refusal": None}


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, loopback: Loopback) -> None:
        super().__init__(("127.0.0.1", 0), _handler(loopback))
        self._problems = loopback.problems

    def handle_error(self, request: object, client_address: object) -> None:
        """Keeps what was raised in the thread of a request, ``reply`` included, for the end of the test."""
        self._problems.append(repr(sys.exception()))


def _handler(loopback: Loopback) -> type[BaseHTTPRequestHandler]:
    """The class of handlers of one server's requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            """Lists the models."""
            if self._refused():
                return
            models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "tests"}]
            self._send(200, json.dumps({"object": "list", "data": models}))

        def do_POST(self) -> None:
            """Answers a request for a completion, or fails it."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._refused():
                return
            if self.path != "/v1/chat/completions":
                self._fail(404, f"no {self.path} here")
                return
            request = loopback._take(self.path, body, dict(self.headers))
            whole = False
            try:
                whole = self._answer(request)
            except (BrokenPipeError, ConnectionResetError):  # the client has gone
                self.close_connection = True
            finally:
                loopback._leave(request, whole)

        def _answer(self, request: Request) -> bool:
            fault = request.fault or Fault()
            time.sleep(0 if fault.what.startswith("drip") else fault.seconds)
            loopback._close()  # before the client can know and ask again
            if fault.what == "drop":
                self.close_connection = True
                return False
            if fault.status != 200:
                self._fail(fault.status, fault.message, fault)
                return False
            text = json.dumps(loopback._completion(request.body))
            texts = {"garbage": "<html>gateway</html>", "cut": text[: len(text) // 2], "odd": '{"choices": "none"}'}
            self._send(200, texts.get(fault.what, text), fault=fault)
            return fault.what not in texts

        def _refused(self) -> bool:
            """Whether the request has another key than the right one; it is then told so."""
            if loopback.key is None or self.headers.get("Authorization") == f"Bearer {loopback.key}":
                return False
            self._fail(401, "Incorrect API key provided")
            return True

        def _fail(self, status: int, message: str, fault: Fault = Fault()) -> None:
            headers = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
            error = {"message": message, "type": "injected", "param": fault.param, "code": fault.code}
            self._send(status, json.dumps({"error": error}), headers)

        def _send(
            self, status: int, text: str, headers: Mapping[str, str] | None = None, fault: Fault = Fault()
        ) -> None:
            drops = int(fault.seconds / DROP)
            blanks = b" " * drops * (fault.what == "drip")
            content = blanks + text.encode()
            self.send_response(status)
            kind = "application/json"
            sent = {"Content-Type": kind, "Content-Length": str(len(content)), "Connection": "close", **(headers or {})}
            for name, value in sent.items():
                self.send_header(name, value)
            if fault.what == "drip headers":
                self.flush_headers()
                self._write_slowly(b"X-Drip: " + b"." * drops + b"\r\n")
            self.end_headers()
            self._write_slowly(blanks)
            self.wfile.write(content[len(blanks) :])

        def _write_slowly(self, content: bytes) -> None:
            for drop in content:
                self.wfile.write(bytes([drop]))
                time.sleep(DROP)

    return Handler
