"""Tokens per second and MFU, without the time spent on anything but training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Tokens per second and MFU over the last steps, without the time spent in ``pause()``.

    MFU = tokens/s × training FLOPs per token ÷ peak FLOP/s.

    Args:
        flops_per_token: training FLOPs per token.
        peak_flops: peak of all devices together, in FLOP/s.
        window: number of the latest counts that the figures are taken over.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        window: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.clock = clock
        self._paused = 0.0
        self._tokens = 0
        self._began = clock()
        # The state after each of the last steps: (training seconds, tokens).
        self._steps: deque[tuple[float, int]] = deque(maxlen=window + 1)

    @property
    def seconds(self) -> float:
        """Seconds of training since construction, without the pauses."""
        return self.clock() - self._began - self._paused

    def add(self, tokens: int) -> None:
        """Count *tokens* tokens (of all ranks) as done at this moment: those of a step, or of several read at
        once."""
        self._tokens += tokens
        self._steps.append((self.seconds, self._tokens))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time spent inside."""
        began = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - began

    def rates(self) -> dict[str, float]:
        """Return ``tokens_per_second`` and ``mfu`` as far as they are known.

        They start with the second step: the first one compiles and fills caches.
        """
        if len(self._steps) < 2:
            return {}
        (first_seconds, first_tokens), (seconds, tokens) = self._steps[0], self._steps[-1]
        if seconds <= first_seconds:
            return {}
        rates = {"tokens_per_second": (tokens - first_tokens) / (seconds - first_seconds)}
        if self.flops_per_token and self.peak_flops:
            rates["mfu"] = rates["tokens_per_second"] * self.flops_per_token / self.peak_flops
        return rates
