"""Limits for code that came with a model: what a chat template may take of time and memory."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Overran(Exception):
    """What ran inside ``deadline`` took longer than it may."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises ``Overran`` in what runs inside once this thread has computed for ``seconds``.

    Time in which the process was stopped or waited for a busy machine does not count. Signals reach the main thread
    alone: in others, and where the system has no interval timers, nothing is limited. Nor is a single call into C that
    does not look for signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    began = time.thread_time()

    def ring(number: int, frame: FrameType | None) -> None:
        if time.thread_time() - began >= seconds:
            raise Overran

    before = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left:  # another timer ran: it goes on with what was left of it
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def within(room: int) -> Iterator[None]:
    """Makes what runs inside meet a MemoryError once the process takes ``room`` bytes more than it has.

    The limit is the process's: it holds in the main thread alone, and where the system tells what a process has.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            pages = int(file.read().split()[0])
    except OSError:
        pages = None
    if pages is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    asked = pages * resource.getpagesize() + room
    known = [limit for limit in (asked, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
