"""Calls in several threads at once."""

import threading
import time

import pytest

from attnpo.evaluation.served import map_in_threads


def test_results_come_with_their_items_and_no_more_run_than_asked_for() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def double(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002 * (number % 3))
        with lock:
            running[0] -= 1
        return 2 * number

    assert dict(map_in_threads(double, range(50), 5)) == {number: 2 * number for number in range(50)}
    assert 1 < most[0] <= 5
    assert list(map_in_threads(double, [], 5)) == []


def test_what_a_thread_raises_is_raised_to_the_caller() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        list(map_in_threads(lambda number: 1 // number, [3, 2, 1, 0], 2))
    end = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set(), "idle threads end"
