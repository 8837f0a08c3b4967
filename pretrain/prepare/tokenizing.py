"""Tokenizes the units of a source, here or in several processes, until there is enough.

Every process takes units one by one, reads and tokenizes them and writes their parts; the output does not
depend on the number of processes.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.assemble import Selection, tokens_kept
from pretrain.prepare.parts import Job, Part, find_finished_parts, is_complete
from pretrain.prepare.progress import Every, Progress, Report
from pretrain.prepare.sources.text_source import Unit

LOOK_SECONDS = 1.0
_SECONDS_TO_LEAVE = 5.0  # of workers whose main process is gone: to end the batch, and remove what they began


class Tokenizing:
    """Tokenizes what is missing of *work*, units with the keys of their parts.

    Args:
        selection: the parts from the beginning on are enough when they hold more tokens than its cap.
    """

    def __init__(
        self, job: Job, work: Sequence[tuple[Unit, str]], selection: Selection, report: Report
    ) -> None:
        self.job, self.work, self.selection = job, work, selection
        self._parts = [find_finished_parts(job.folder, key) for _, key in work]
        self._missing = [number for number, parts in enumerate(self._parts) if not is_complete(parts)]
        self._progress = Progress(
            "tokenizing", report, sum(part.marker.bytes for part in self._collect_parts())
        )
        self._recount_from = 0  # number of tokens from which it is worth looking for duplicates again

    def run(self, processes: int) -> list[list[Part]]:
        """Make the parts, and return those to assemble, in order, of each unit.

        Args:
            processes: 1 works in this process, with the tokenizer's threads. More start this many at most;
                where there are fewer units (one large compressed file), each uses several threads instead.

        Raises:
            UserError: a source that cannot be read, or a process that was killed.
        """
        if self._missing and not self._has_enough():
            if processes == 1:
                self._run_here()
            else:
                self._run_in_processes(processes)
        self._look(len(self._missing), last=True)
        return self._collect_without_gap()

    def _run_here(self) -> None:
        due, tokenizer = Every(LOOK_SECONDS), load_tokenizer(self.job.tokenizer_folder)
        for begun, number in enumerate(self._missing, start=1):
            for _ in self.job.tokenize(*self.work[number], tokenizer):
                if due():
                    self._look(begun)
            if self._look(begun):
                return

    def _run_in_processes(self, processes: int) -> None:
        count = min(processes, len(self._missing))
        # Spawned: a forked child would inherit the locks of threads that run here.
        context = multiprocessing.get_context("spawn")
        stop = context.RawValue("b", 0)
        with ProcessPoolExecutor(count, context, _begin, (self.job, stop, processes // count)) as pool:
            with _hide_main_module():  # they are started here
                waiting = {pool.submit(_tokenize, *self.work[number]) for number in self._missing}
            try:
                while waiting:
                    done, waiting = wait(waiting, LOOK_SECONDS, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if self._look(len(self._missing) - len(waiting) + count):
                        return
            except (BrokenProcessPool, MemoryError) as error:
                raise UserError(
                    f"processes: one of {count} was killed or had no memory left; what is finished is kept: "
                    "the same command continues, with fewer --processes if memory is short"
                ) from error
            finally:
                stop.value = 1  # those that still work leave after the current batch
                pool.shutdown(cancel_futures=True)

    def _look(self, begun: int, last: bool = False) -> bool:
        """Look at the first *begun* of the missing units again; True if no more is needed."""
        for number in self._missing[:begun]:
            if not is_complete(self._parts[number]):
                key, known = self.work[number][1], self._parts[number]
                self._parts[number] = find_finished_parts(self.job.folder, key, known)
        if last or self._progress.is_due():
            markers = [part.marker for part in self._collect_parts()]
            documents, size, tokens = (
                sum(getattr(marker, name) for marker in markers) for name in ("documents", "bytes", "tokens")
            )
            self._progress(documents, size, tokens, size if last else self._estimate(size))
        return self._has_enough()

    def _collect_parts(self) -> Iterator[Part]:
        return (part for parts in self._parts for part in parts)

    def _collect_without_gap(self) -> list[list[Part]]:
        """The finished parts from the beginning on: the output would depend on processes that ran ahead."""
        complete = sum(1 for _ in itertools.takewhile(is_complete, self._parts))
        return self._parts[: complete + 1]

    def _has_enough(self) -> bool:
        most = self.selection.max_tokens
        if most is None:
            return False
        parts = list(itertools.chain.from_iterable(self._collect_without_gap()))
        tokens = sum(part.marker.tokens for part in parts)
        if tokens <= max(most, self._recount_from):
            return False
        kept_tokens = tokens_kept(parts, self.selection)
        self._recount_from = tokens + most - kept_tokens
        return kept_tokens > most

    def _estimate(self, done: int) -> int:
        """Bytes of text in the whole source, 0 if nothing is known: from the complete units, bytes of text
        per byte on disk, or per unit."""
        weights = [max(unit.size, 1) for unit, _ in self.work]
        complete = [number for number, parts in enumerate(self._parts) if is_complete(parts)]
        if not complete:
            return max(sum(weights), done + 1) if any(unit.size for unit, _ in self.work) else 0
        text = sum(part.marker.bytes for number in complete for part in self._parts[number])
        return max(text * sum(weights) // sum(weights[number] for number in complete), done + 1)


# ---------------------------------------------------------------------- in a worker

_job: Job
_stop: Any
"""A shared integer, 0 while work continues. It has no lock, since a killed process could keep it."""


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Let started processes not run the program again that called this one, to have its main module: nothing
    here needs that, and a program that prepares data at its top level would begin once more."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name, None) for name in ("__file__", "__spec__")}
    try:
        for name in hidden:
            setattr(main, name, None)
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _begin(job: Job, stop: Any, threads: int) -> None:
    """Set up a worker."""
    global _job, _stop
    _job, _stop = job, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process ends the others
    # Read by the tokenizers library when it first encodes.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main() -> None:
    main = multiprocessing.parent_process()
    if main is not None:
        main.join()
        _stop.value = 1
        time.sleep(_SECONDS_TO_LEAVE)
        os._exit(1)


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    tokenizer.threads = int(os.environ["RAYON_NUM_THREADS"])
    return tokenizer


def _tokenize(unit: Unit, key: str) -> None:
    for _ in _job.tokenize(unit, key, _tokenizer(_job.tokenizer_folder)):
        if _stop.value:
            return
