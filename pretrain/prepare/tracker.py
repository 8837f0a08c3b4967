"""Tracks a preparation: which units are missing, whether the cap on tokens is reached, and its progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.data.making.assemble import Selection, tokens_kept
from pretrain.data.making.progress import Every, ProgressCallback
from pretrain.data.making.tokenized import Counts, tokenizing
from pretrain.data.sources.source import Unit
from pretrain.prepare.parts import StoredPart, finished_parts, is_complete

REPORT_SECONDS = 1.0


class Tracker:
    """Follows the units of *work* (each with the key of its parts in *folder*), and reports about once a
    second."""

    def __init__(
        self,
        folder: Path,
        work: Sequence[tuple[Unit, str]],
        selection: Selection,
        report: ProgressCallback,
    ) -> None:
        self._folder, self._work, self._selection, self._report = folder, work, selection, report
        self._parts = [finished_parts(folder, key) for _, key in work]
        self._open = [number for number, parts in enumerate(self._parts) if not is_complete(parts)]
        self.missing = [work[number] for number in self._open]
        """Units that were not complete at first, in order."""
        self._bytes_before = self.counts().bytes
        self._started, self._due = time.monotonic(), Every(REPORT_SECONDS)
        self._recount_from = 0  # number of tokens from which it is worth looking for duplicates again

    def counts(self) -> Counts:
        """What has been tokenized."""
        total = Counts()
        for parts in self._parts:
            for part in parts:
                total.add(part.counts)
        return total

    def look(self, begun: int, at_once: bool = True) -> bool:
        """Look at the first *begun* of the missing units again; True if no more is needed.

        Args:
            at_once: whether to look even if a report is not due.
        """
        due = self._due()
        if not (due or at_once):
            return False
        for number in self._open[:begun]:
            if not is_complete(self._parts[number]):
                self._parts[number] = finished_parts(self._folder, self._work[number][1], self._parts[number])
        if due:
            counts = self.counts()
            self._send(counts, self._estimate(counts.bytes))
        return self.enough()

    def enough(self) -> bool:
        """Whether the parts from the beginning on, without a gap, hold more tokens than the cap.

        Parts behind a gap, from processes that ran ahead, do not count: the output would depend on them.
        """
        most = self._selection.max_tokens
        if most is None:
            return False
        parts = self.parts()
        tokens = sum(part.marker.tokens for part in parts)
        if tokens <= max(most, self._recount_from):
            return False
        kept_tokens = tokens_kept(parts, self._selection)
        self._recount_from = tokens + most - kept_tokens
        return kept_tokens > most

    def parts(self) -> list[StoredPart]:
        """The finished parts from the beginning on, without a gap."""
        found: list[StoredPart] = []
        for parts in self._parts:
            found += parts
            if not is_complete(parts):
                break
        return found

    def finish(self) -> list[StoredPart]:
        """Report the end (the total is known); returns the parts to assemble, in order."""
        self.look(len(self._open))
        counts = self.counts()
        self._send(counts, counts.bytes)
        return self.parts()

    def _estimate(self, done: int) -> int:
        """Bytes of text in the whole source, 0 if nothing is known: from the complete units, bytes of text
        per byte on disk, or per unit."""
        weights = [max(unit.size, 1) for unit, _ in self._work]
        complete = [number for number, parts in enumerate(self._parts) if is_complete(parts)]
        if complete:
            text = sum(part.marker.bytes for number in complete for part in self._parts[number])
            estimate = text * sum(weights) // sum(weights[number] for number in complete)
        else:
            estimate = sum(weights) if any(unit.size for unit, _ in self._work) else 0
        return max(estimate, done + 1) if estimate else 0

    def _send(self, counts: Counts, total: int) -> None:
        self._report(tokenizing(counts, total, time.monotonic() - self._started, self._bytes_before))
