"""Shows the progress of something that takes longer than a few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from pretrain.utils.format import human_seconds


def terminal_columns(stream: TextIO) -> int:
    """Columns of the terminal that *stream* writes to; 0 for a file, and for a terminal that does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class ProgressLine:
    """Shows how much is done: a bar on a terminal, a line every few seconds in a log.

    Args:
        what: what is done, such as ``heads removed``.
        unit: what is counted, such as ``pass``.
        stream: standard output by default.
        every_seconds: shortest time between two lines of a log.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        stream: TextIO | None = None,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.unit = what, unit
        self.stream = sys.stdout if stream is None else stream
        self.every_seconds, self.clock = every_seconds, clock
        self._started = self._printed = clock()
        self._bar: Any = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Show that *done* of *total* units are done."""
        if terminal_columns(self.stream):
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, file=self.stream, desc=self.what, unit=self.unit, leave=False)
            self._bar.update(done - self._bar.n)
            return
        now = self.clock()
        if now - self._printed < self.every_seconds:
            return
        self._printed = now
        left = human_seconds((now - self._started) / done * (total - done))
        print(f"{self.what}: {self.unit} {done:,} of {total:,}, {left} left", file=self.stream, flush=True)
