"""Prefetches batches in a background thread, so that the training step never waits for data."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class BatchPrefetcher(Generic[Batch]):
    """Iterator over ``fetch(start), fetch(start + 1), …``, at most *depth* batches ahead of the consumer.

    An exception in ``fetch`` is raised by the ``next()`` that asks for that batch, after all batches before
    it; StopIteration ends the iteration. Close it (or use it in ``with``) to end the thread. The thread is a
    daemon, so it never keeps the process alive.
    """

    def __init__(self, fetch: Callable[[int], Batch], start: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth {depth}: at least 1 batch must be fetched ahead")
        self.wait_seconds = 0.0
        """Seconds that the consumer has spent waiting in ``next()``, in total."""
        self._fetch = fetch
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(start,), name="batch-prefetch", daemon=True)
        self._thread.start()

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                batch = self._fetch(number)
            except BaseException as error:  # of any kind: passed on to the consumer
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(batch)
                self._changed.notify_all()
            number += 1

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            self.wait_seconds += time.perf_counter() - started
            if self._ready and not self._closed:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._closed or isinstance(self._error, StopIteration):
                raise StopIteration
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        """Drop the batches that are ready and end the thread, after its current fetch; may be
        called twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> BatchPrefetcher[Batch]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
