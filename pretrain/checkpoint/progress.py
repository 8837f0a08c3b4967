"""Reports the progress of work on a checkpoint, parameter by parameter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

Report = Callable[[str], object]
EVERY_SECONDS = 5.0


class Progress:
    """Counts parameters and bytes; reports at the first one, then every few seconds, and at the last.

    Args:
        what: what is being done, the start of every line.
        shapes: of the parameters to process, by name.
        report: receives the lines.
    """

    def __init__(self, what: str, shapes: Mapping[str, Sequence[int]], report: Report) -> None:
        # A parameter is three fp32 tensors: its weight and two moments.
        self._bytes = {name: 12 * math.prod(shape) for name, shape in shapes.items()}
        self._what, self._report = what, report
        self._count = self._bytes_done = 0
        self._next_report = time.monotonic()

    def add(self, name: str) -> None:
        """Count one parameter as done."""
        self._count += 1
        self._bytes_done += self._bytes[name]
        now = time.monotonic()
        if now >= self._next_report or self._count == len(self._bytes):
            self._next_report = now + EVERY_SECONDS
            self._report(
                f"{self._what}: {self._count} of {len(self._bytes)} parameters, "
                f"{self._bytes_done / 1e6:,.1f} of {sum(self._bytes.values()) / 1e6:,.1f} MB"
            )
