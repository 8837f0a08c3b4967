"""Reports how far a preparation has come."""

from __future__ import annotations

import time
from collections.abc import Callable

from pretrain.utils.format import human_seconds

REPORT_SECONDS = 10.0
Report = Callable[[str], object]
"""Receives a line for each stage, and its progress every ten seconds."""


def report_nothing(line: str) -> None:
    """Report nothing."""


class Every:
    """True of a call if this many seconds have passed since one that was true, or since the beginning.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._last = clock()

    def __call__(self) -> bool:
        now = self._clock()
        if due := now - self._last >= self._seconds:
            self._last = now
        return due


class Progress:
    """Reports the progress of a stage.

    Args:
        before: bytes of text that an earlier process had done; they do not count for the rate.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, stage: str, report: Report, before: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stage, self.before = stage, before
        self.is_due = Every(REPORT_SECONDS, clock)
        """Whether it is time for a report."""
        self._report, self._clock, self._started = report, clock, clock()

    def __call__(self, documents: int, size: int, tokens: int = 0, total: int = 0) -> None:
        """Report that *size* bytes of text are done, of an estimated *total* (0 if nothing is known)."""
        rate = (size - self.before) / max(self._clock() - self._started, 1e-9)
        of_total = f" of {total / 1e6:.1f}" if total else ""
        parts = [f"{documents:,} documents", f"{size / 1e6:.1f}{of_total} MB"]
        if tokens:
            parts.append(f"{tokens:,} tokens")
        parts.append(f"{rate / 1e6:.1f} MB/s")
        if total > size and rate > 0:
            parts.append(f"{human_seconds((total - size) / rate)} left")
        self._report(f"{self.stage}: {', '.join(parts)}")
