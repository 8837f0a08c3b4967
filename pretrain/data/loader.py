"""Prefetches batches in a background thread, so that the training step never waits for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class BatchPrefetcher(Generic[Batch]):
    """Iterator over ``fetch(start), fetch(start + 1), …``, at most *depth* batches ahead of the consumer.

    An exception in ``fetch`` is raised by the ``next()`` that asks for that batch, after all batches before
    it; StopIteration ends the iteration. Close it (or use it in ``with``) to end the thread.
    """

    def __init__(self, fetch: Callable[[int], Batch], start: int, depth: int = 2) -> None:
        self.wait_seconds = 0.0
        """Seconds that the consumer has spent waiting in ``next()``, in total."""
        self._fetch, self._number = fetch, start
        self._thread = ThreadPoolExecutor(1, "batch-prefetch")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        self._ahead.append(self._thread.submit(self._fetch, self._number))
        self._number += 1

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            raise StopIteration
        started = time.perf_counter()
        try:
            batch = self._ahead[0].result()  # an error stays, for the calls after this one
        finally:
            self.wait_seconds += time.perf_counter() - started
        self._ahead.popleft()
        self._submit()
        return batch

    def close(self) -> None:
        """Drop the batches that are ready and end the thread, after its current fetch; may be
        called twice."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> BatchPrefetcher[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
