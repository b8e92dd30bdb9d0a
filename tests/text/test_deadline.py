"""The time limit of templates: what it stops, what it leaves as it was."""

import signal
import threading
import time

import pytest

from attnpo.text.chat import Overran, deadline


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_computing_is_stopped_and_waiting_is_not() -> None:
    began = time.thread_time()
    with pytest.raises(Overran), deadline(0.1):
        compute(60)
    assert time.thread_time() - began < 5
    with deadline(0.05):
        time.sleep(0.2)


def test_timers_and_handlers_of_others_are_left_as_they_were() -> None:
    def ring(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 300)
    try:
        with deadline(10.0):
            pass
        assert signal.getsignal(signal.SIGALRM) is ring
        assert 200 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_compute_as_long_as_they_want() -> None:
    done = []

    def work() -> None:
        with deadline(0.01):
            compute(0.1)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
