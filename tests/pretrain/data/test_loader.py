"""The background thread: in order, ahead by so much and no more, honest about errors."""

from __future__ import annotations

import threading
import time

import pytest

from pretrain.data.loader import BatchPrefetcher


def wait_until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batches_come_in_order_from_the_start():
    with BatchPrefetcher(lambda number: number * 10, start=3, depth=2) as batches:
        assert [next(batches) for _ in range(100)] == [number * 10 for number in range(3, 103)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_stays_ahead_by_its_depth(depth):
    fetched: list[int] = []
    with BatchPrefetcher(lambda number: fetched.append(number) or number, start=0, depth=depth) as batches:
        wait_until(lambda: len(fetched) == depth)
        time.sleep(0.02)
        assert len(fetched) == depth
        next(batches)
        wait_until(lambda: len(fetched) == depth + 1)


def test_only_waiting_is_counted():
    def slow(number: int) -> int:
        time.sleep(0.05)
        return number

    with BatchPrefetcher(slow, start=0, depth=2) as batches:
        next(batches)
        assert batches.wait_seconds >= 0.03
        wait_until(lambda: all(future.done() for future in batches._ahead))
        before = batches.wait_seconds
        next(batches)
        assert batches.wait_seconds - before < 0.02, "a batch that is ready costs no wait"


def test_errors_reach_the_consumer_in_their_place():
    def fetch(number: int) -> int:
        if number == 2:
            raise KeyError("no batch 2")
        return number

    with BatchPrefetcher(fetch, start=0, depth=4) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        for _ in range(2):
            with pytest.raises(KeyError, match="no batch 2"):
                next(batches)


def test_stop_iteration_ends_it():
    def fetch(number: int) -> int:
        if number == 3:
            raise StopIteration
        return number

    with BatchPrefetcher(fetch, start=0) as batches:
        assert list(batches) == [0, 1, 2]


def test_close_ends_the_thread_and_the_iteration():
    batches = BatchPrefetcher(lambda number: number, start=0)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []
    assert not any(thread.name == "batch-prefetch" for thread in threading.enumerate())
