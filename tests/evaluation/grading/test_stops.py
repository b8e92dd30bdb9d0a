"""A grading process that is killed or stopped, and goes on: over real processes and a real socket."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnpo.cli.terminal import exit_process, install_signal_handlers, run_guarded
from attnpo.evaluation.jsonl_store import GRADES, ReplyStore
from attnpo.evaluation.openai_chat import OpenAIGrader
from attnpo.evaluation.session import ask_all
from attnpo.schema import UserError, digest
from tests import warm
from tests.evaluation.grading.calls import call
from tests.evaluation.grading.loopback import Body, Loopback

CALLS = [call(number) for number in range(20)]
PROMPT = 12  # calls that are answered at once; the others wait until the test lets them


def main() -> int:
    """Asks all calls: the process that is stopped."""
    ask_all(CALLS, OpenAIGrader(base_url=sys.argv[1], concurrency=4, timeout=100.0), ReplyStore(Path(sys.argv[2])))
    return 0


@contextmanager
def asking(server: Loopback, folder: Path) -> Iterator[warm.Process]:
    """A process that asks all calls, once it has stored as many as are answered at once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    told = folder / "told"
    process = warm.start([__file__, server.base_url, str(folder)], environment, told)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None and lines(folder) < PROMPT:
            time.sleep(0.02)
        assert lines(folder) == PROMPT, told.read_text()
        yield process
    finally:
        process.kill()


def lines(folder: Path) -> int:
    file = folder / GRADES
    return file.read_bytes().count(b"\n") if file.is_file() else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_what_is_stored_is_not_asked_again(number: signal.Signals, tmp_path: Path) -> None:
    go, lock, seen = threading.Event(), threading.Lock(), []

    def reply(body: Body) -> str:
        with lock:
            seen.append(body)
            waits = len(seen) > PROMPT
        if waits:
            go.wait(60)
        return "Rating: " + body["messages"][1]["content"].split()[2]

    with Loopback(reply) as server:
        with asking(server, tmp_path) as process:
            with pytest.raises(UserError, match="in use by process"):
                ask_all(CALLS, OpenAIGrader(base_url=server.base_url), ReplyStore(tmp_path))
            sent = time.monotonic()
            process.send_signal(number)
            process.wait(timeout=30)
            ended = time.monotonic() - sent
        go.set()
        stored = {json.loads(line)["item"] for line in (tmp_path / GRADES).read_text().splitlines()}
        before = len(server.requests)
        asked = ask_all(CALLS, OpenAIGrader(base_url=server.base_url), ReplyStore(tmp_path))
    assert ended < 20, "it waits for no reply"
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert len(stored) == PROMPT and before <= PROMPT + 4, "at most the calls in flight are lost"
    again = {request.digest for request in server.requests[before:]}
    assert again == {digest(list(each.messages)) for each in CALLS if each.item not in stored}
    assert len(server.requests) - before == len(again) == asked.made == len(CALLS) - PROMPT
    assert {each.item: reply.text for each, reply in asked.replies.items()} == {
        each.item: f"Rating: {each.item[1:]}" for each in CALLS
    }
    assert lines(tmp_path) == len(CALLS)


if __name__ == "__main__":
    install_signal_handlers()
    exit_process(run_guarded(main))
