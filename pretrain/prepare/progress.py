"""Reports the progress of a preparation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

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
    """Since this process began to tokenize."""
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
        seconds_left = self.seconds_left
        return (
            f"{self.documents:,} documents, {self.bytes / 1e6:.1f}{of_total} MB, {self.tokens:,} tokens, "
            f"{self.rate / 1e6:.1f} MB/s"
            + (
                ""
                if self.done
                else ", time left unknown"
                if seconds_left is None
                else f", {human_seconds(seconds_left)} left"
            )
        )

    def __str__(self) -> str:
        return f"{self.stage}: {self.figures()}" if self.counted else self.stage


ProgressCallback = Callable[[Progress], None]


class Reading:
    """Reports the progress of a pass over a source's text, every few seconds.

    Args:
        stage: what the text is read for.
        total_bytes: of text in the source; 0 if unknown.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        stage: str,
        report: ProgressCallback,
        total_bytes: int = 0,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._report, self._total = stage, report, total_bytes
        self._every, self._clock = every_seconds, clock
        self._started = self._reported = clock()

    def add(self, documents: int, bytes: int) -> None:
        """Report what has been read so far, if *every_seconds* have passed."""
        now = self._clock()
        if now - self._reported < self._every:
            return
        self._reported = now
        of_total = f" of {self._total / 1e6:.1f}" if self._total else ""
        rate = bytes / 1e6 / (now - self._started)
        time_left = (
            f", {human_seconds((self._total - bytes) / 1e6 / rate)} left" if self._total and rate else ""
        )
        figures = f"{documents:,} documents, {bytes / 1e6:.1f}{of_total} MB, {rate:.1f} MB/s{time_left}"
        self._report(Progress(f"{self._stage}: {figures}"))


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
        self.every_seconds = every_seconds
        self.clock = clock
        self._bar: tqdm[Any] | None = None
        self._printed_at: float | None = None

    def __call__(self, progress: Progress) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        if progress.counted and stream.isatty():
            self._draw(progress, stream)
            return
        now = self.clock()
        if progress.counted and not progress.done:
            if self._printed_at is None:
                self._printed_at = now  # the first figures of a stage say little
            if now - self._printed_at < self.every_seconds:
                return
            self._printed_at = now
        print(progress, file=stream, flush=True)

    def _draw(self, progress: Progress, stream: TextIO) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total_bytes or None,
                file=stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar:20}| {desc}",
            )
        self._bar.total = progress.total_bytes or None
        self._bar.n = progress.bytes
        self._bar.set_description_str(progress.figures(), refresh=True)
        if progress.done:
            self._bar.close()
            self._bar = None
