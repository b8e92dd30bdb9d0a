"""Calls of a function in several threads at once, results as they come."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[tuple[_Item, _Result]]:
    """Yields each item with ``function(item)``, in the order in which they are done.

    Pulls an item only when a thread is free for it. What ``function`` raises is raised here. The threads do not keep
    the process alive: an executor's would, so that Ctrl-C waited for answers that nobody will read.
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
