"""Tracks a preparation: which units are missing, whether the cap on tokens is reached, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.data.sources.source import Unit
from pretrain.prepare.output import Selection, tokens_kept
from pretrain.prepare.parts import Counts, Part, finished_parts
from pretrain.prepare.progress import Progress, ProgressCallback

_REPORT_SECONDS = 1.0


class Tracker:
    """Follows the units of *work* (each with the key of its parts in *folder*), and reports about once a second."""

    def __init__(
        self,
        folder: Path,
        work: Sequence[tuple[Unit, str]],
        selection: Selection,
        report: ProgressCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._work, self._selection, self._report, self._clock = (
            folder,
            work,
            selection,
            report,
            clock,
        )
        self.counts = Counts()
        self._complete: set[str] = set()
        # The amount of text is estimated from the complete units: bytes of text per byte on disk, or per unit.
        self._known_sizes = any(unit.size for unit, _ in work)
        self._weight = sum(max(unit.size, 1) for unit, _ in work)
        self._complete_weight = self._complete_bytes = 0
        for unit, key in work:
            parts = finished_parts(folder, key)
            for part in parts:
                self.counts.add(part.counts)
            if parts and parts[-1].last:
                self._note_complete(unit, key, parts)
        self._bytes_before = self.counts.bytes
        self._started = self._reported = clock()
        self._prefix: list[Part] = []  # parts of the complete units at the beginning of the list
        self._prefix_units = 0
        self._recount_from = 0  # number of tokens from which it is worth looking for duplicates again

    def missing(self) -> list[tuple[Unit, str]]:
        """Units that are not complete, in order."""
        return [(unit, key) for unit, key in self._work if key not in self._complete]

    def add(self, counts: Counts) -> None:
        """Add the counts of a batch."""
        self.counts.add(counts)
        if self._clock() - self._reported >= _REPORT_SECONDS:
            self._send(self._estimate())

    def unit_done(self, unit: Unit, key: str) -> bool:
        """Record that a unit was worked on; True if no more are needed."""
        parts = finished_parts(self._folder, key)
        if parts and parts[-1].last:
            self._note_complete(unit, key, parts)
        return self.enough()

    def _note_complete(self, unit: Unit, key: str, parts: list[Part]) -> None:
        self._complete.add(key)
        self._complete_weight += max(unit.size, 1)
        self._complete_bytes += sum(part.counts.bytes for part in parts)

    def enough(self) -> bool:
        """Whether the parts from the beginning on, without a gap, hold more tokens than the cap.

        Parts behind a gap, from processes that ran ahead, do not count: the output would depend on them.
        """
        max_tokens = self._selection.max_tokens
        if max_tokens is None:
            return False
        parts = self._parts_without_gap()
        tokens = sum(part.counts.tokens for part in parts)
        if tokens <= max(max_tokens, self._recount_from):
            return False
        kept_tokens = tokens_kept(parts, self._selection)
        self._recount_from = tokens + max_tokens - kept_tokens
        return kept_tokens > max_tokens

    def _parts_without_gap(self) -> list[Part]:
        while self._prefix_units < len(self._work) and self._work[self._prefix_units][1] in self._complete:
            self._prefix += finished_parts(self._folder, self._work[self._prefix_units][1])
            self._prefix_units += 1
        if self._prefix_units == len(self._work):
            return self._prefix
        return self._prefix + finished_parts(self._folder, self._work[self._prefix_units][1])

    def finish(self) -> list[Part]:
        """Report the end (the total is known); returns the parts to assemble, in order."""
        self._send(self.counts.bytes)
        return self._parts_without_gap()

    def _estimate(self) -> int:
        """Bytes of text in the whole source, 0 if nothing is known."""
        if self._complete_weight:
            estimate = self._complete_bytes * self._weight // self._complete_weight
        else:
            estimate = self._weight if self._known_sizes else 0
        return max(estimate, self.counts.bytes + 1) if estimate else 0

    def _send(self, total: int) -> None:
        self._reported = now = self._clock()
        counts = self.counts
        self._report(
            Progress(
                "tokenizing", counts.documents, counts.tokens, counts.bytes, total, now - self._started,
                bytes_before=self._bytes_before, counted=True,
            )
        )  # fmt: skip
