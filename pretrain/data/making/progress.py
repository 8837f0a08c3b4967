"""How far a preparation has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.utils.text import human_seconds


@dataclass(frozen=True)
class Progress:
    """One report of a preparation; ``str()`` gives a line to print."""

    stage: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    """Of text, as in all fields."""
    total_bytes: int = 0
    """Of the whole source; an estimate until the last report, 0 if there is none yet."""
    seconds: float = 0.0
    """Since this process began with the stage."""
    bytes_before: int = 0
    """The part of *bytes* that an earlier process had done."""
    counted: bool = False
    """Whether this report has counts."""

    @property
    def done(self) -> bool:
        """Whether it is the last report of its stage."""
        return self.counted and self.bytes == self.total_bytes

    @property
    def rate(self) -> float:
        """Bytes of text a second."""
        return (self.bytes - self.bytes_before) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the end; None if nothing is known yet."""
        if not self.total_bytes or self.rate <= 0:
            return None
        return max(0, self.total_bytes - self.bytes) / self.rate

    def figures(self) -> str:
        """Documents, tokens, MB/s, time left."""
        of_total = f" of {self.total_bytes / 1e6:.1f}" if self.total_bytes else ""
        figures = [f"{self.documents:,} documents", f"{self.bytes / 1e6:.1f}{of_total} MB"]
        if self.tokens:
            figures.append(f"{self.tokens:,} tokens")
        figures.append(f"{self.rate / 1e6:.1f} MB/s")
        if not self.done and self.seconds_left is not None:
            figures.append(f"{human_seconds(self.seconds_left)} left")
        return ", ".join(figures)

    def __str__(self) -> str:
        return f"{self.stage}: {self.figures()}" if self.counted else self.stage


ProgressCallback = Callable[[Progress], object]


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
