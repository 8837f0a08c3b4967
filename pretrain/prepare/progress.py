"""Prints the progress of a preparation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from pretrain.data.making.progress import Every, Progress


class ProgressPrinter:
    """A progress callback: a bar on a terminal, a line every few seconds in a log.

    Args:
        stream: standard output by default.
        every_seconds: shortest time between two lines of one stage in a log; its last line always appears.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every = lambda: Every(every_seconds, clock)
        self._due: Every | None = None
        self._bar: tqdm[Any] | None = None

    def __call__(self, progress: Progress) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        if progress.counted and stream.isatty():
            self._draw(progress, stream)
            return
        if progress.counted and not progress.done:
            self._due = self._due or self._every()  # the first figures of a stage say little
            if not self._due():
                return
        print(progress, file=stream, flush=True)

    def _draw(self, progress: Progress, stream: TextIO) -> None:
        if self._bar is None:
            self._bar = tqdm(
                file=stream, dynamic_ncols=True, bar_format="{percentage:3.0f}% |{bar:20}| {desc}"
            )
        self._bar.total = progress.total_bytes or None
        self._bar.n = progress.bytes
        self._bar.set_description_str(progress.figures(), refresh=True)
        if progress.done:
            self._bar.close()
            self._bar = None
