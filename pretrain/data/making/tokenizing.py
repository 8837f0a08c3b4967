"""Tokenizes the units of a source, here or in several processes, until there is enough.

Every process takes units one by one, reads and tokenizes them by itself and writes their parts; the output
does not depend on how many processes there are.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path

from model.errors import UserError
from pretrain.data.making.assemble import Selection, tokens_kept
from pretrain.data.making.parts import Job, Part, finished_parts, is_complete
from pretrain.data.making.progress import Every, Progress, Report
from pretrain.data.sources.source import Unit
from pretrain.data.tokenizer import Tokenizer, load_tokenizer

LOOK_SECONDS = 1.0
_SECONDS_TO_LEAVE = 5.0


class Tokenizing:
    """Tokenizes what is missing of *work*, units with the keys of their parts.

    Args:
        selection: the parts from the beginning on are enough when they hold more tokens than its cap.
    """

    def __init__(
        self, job: Job, work: Sequence[tuple[Unit, str]], selection: Selection, report: Report
    ) -> None:
        self.job, self.work, self.selection = job, work, selection
        self._parts = [finished_parts(job.folder, key) for _, key in work]
        self._missing = [number for number, parts in enumerate(self._parts) if not is_complete(parts)]
        self._progress = Progress("tokenizing", report, sum(part.marker.bytes for part in self._all()))
        self._recount_from = 0  # number of tokens from which it is worth looking for duplicates again

    def run(self, tokenizer: Tokenizer, processes: int) -> list[Part]:
        """Make the parts, and return those to assemble, in order.

        Args:
            processes: 1 works in this process, with the tokenizer's threads. More start this many at most;
                where there are fewer units (one large compressed file), each uses several threads instead.

        Raises:
            UserError: a source that cannot be read, or a process that was killed.
        """
        if self._missing and not self._enough():
            if processes == 1:
                self._here(tokenizer)
            else:
                self._in_processes(processes)
        self._look(len(self._missing), last=True)
        return list(self._without_gap())

    def _here(self, tokenizer: Tokenizer) -> None:
        due = Every(LOOK_SECONDS)
        for begun, number in enumerate(self._missing, start=1):
            look = functools.partial(self._look_if, due, begun)
            self.job.tokenize(*self.work[number], tokenizer, look)
            if self._look(begun):
                return

    def _in_processes(self, processes: int) -> None:
        count = min(processes, len(self._missing))
        # Spawned: a forked child would inherit the locks of threads that run here.
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        with ProcessPoolExecutor(count, context, _begin, (self.job, theirs, processes // count)) as pool:
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
                if waiting:
                    ours.close()  # they leave after the current batch
                pool.shutdown(cancel_futures=True)

    def _look_if(self, due: Every, begun: int) -> None:
        if due():
            self._look(begun)

    def _look(self, begun: int, last: bool = False) -> bool:
        """Look at the first *begun* of the missing units again; True if no more is needed."""
        for number in self._missing[:begun]:
            if not is_complete(self._parts[number]):
                key, known = self.work[number][1], self._parts[number]
                self._parts[number] = finished_parts(self.job.folder, key, known)
        if last or self._progress.due():
            markers = [part.marker for part in self._all()]
            documents, size, tokens = (
                sum(getattr(marker, name) for marker in markers) for name in ("documents", "bytes", "tokens")
            )
            self._progress(documents, size, tokens, size if last else self._estimate(size))
        return self._enough()

    def _all(self) -> Iterator[Part]:
        return (part for parts in self._parts for part in parts)

    def _without_gap(self) -> Iterator[Part]:
        """The finished parts from the beginning on: the output would depend on processes that ran ahead."""
        for parts in self._parts:
            yield from parts
            if not is_complete(parts):
                return

    def _enough(self) -> bool:
        most = self.selection.max_tokens
        if most is None:
            return False
        parts = list(self._without_gap())
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
_stopped = threading.Event()
_working = threading.Lock()


def _begin(job: Job, main: Connection, threads: int) -> None:
    """Set up a worker. *main* ends when the main process closes it, or is gone."""
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process ends the others
    # Read by the tokenizers library when it first encodes.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_end_with_main, args=(main,), daemon=True).start()


def _end_with_main(main: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        main.recv()
    _stopped.set()
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join(_SECONDS_TO_LEAVE)  # as long as it lives, its pool ends this process in order
    _working.acquire(timeout=_SECONDS_TO_LEAVE)
    os._exit(1)


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    tokenizer.threads = int(os.environ["RAYON_NUM_THREADS"])
    return tokenizer


def _tokenize(unit: Unit, key: str) -> None:
    with _working:
        _leave_if_stopped()
        _job.tokenize(unit, key, _tokenizer(_job.tokenizer_folder), _leave_if_stopped)


def _leave_if_stopped() -> None:
    if _stopped.is_set():
        raise SystemExit(1)
