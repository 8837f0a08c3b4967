"""Tokenizes the units of a source in several processes.

Every process takes units one by one, reads and tokenizes them by itself and writes their parts. Nothing
passes between processes but the number of units that are taken, and the output does not depend on how many
there are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare import tracker as tracking
from pretrain.prepare.parts import tokenize_unit
from pretrain.prepare.tracker import Tracker

_SECONDS_TO_LEAVE = 10.0  # that a terminated process gets before it is killed


@dataclass(frozen=True)
class Tokenizing:
    """How units become parts."""

    source: TextSource
    folder: Path
    """Of the parts."""
    tokenizer_folder: Path
    """Where the tokenizer is saved, for other processes."""
    dtype: np.dtype[Any]
    part_bytes: int
    most_tokens: int | None
    """The rest of a unit is skipped when it has more tokens."""

    def tokenize(
        self, unit: tuple[Unit, str], tokenizer: Tokenizer, after_batch: Callable[[], object]
    ) -> None:
        """Make the parts of one unit with its key."""
        limits = (self.part_bytes, self.most_tokens)
        tokenize_unit(self.source, *unit, self.folder, tokenizer, self.dtype, after_batch, *limits)


def tokenize_units(how: Tokenizing, tokenizer: Tokenizer, tracker: Tracker, processes: int) -> None:
    """Tokenize the units that *tracker* misses, until it has enough.

    Args:
        processes: 1 works in this process, with the tokenizer's threads. More start this many at most; where
            there are fewer units (one large compressed file), each process uses several threads instead.

    Raises:
        UserError: a source that cannot be read, or a process that was killed.
    """
    if tracker.enough():
        return
    work = tracker.missing
    if processes == 1:
        for begun, unit in enumerate(work, start=1):
            how.tokenize(unit, tokenizer, partial(tracker.look, begun, at_once=False))
            if tracker.look(begun):
                return
        return
    count = min(processes, len(work))
    # Spawned: a forked child would inherit the locks of threads that run here.
    context: Any = multiprocessing.get_context("spawn")
    taken, errors = context.Value("q", 0), context.SimpleQueue()
    arguments = (how, work, taken, errors, max(1, processes // max(count, 1)))
    workers = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        running = workers
        while running:
            wait([worker.sentinel for worker in running], tracking.REPORT_SECONDS)
            codes = [worker.exitcode for worker in running]
            if tracker.look(taken.value):
                return
            for code in codes:
                if code:
                    raise _death(code, count) if errors.empty() else errors.get()
            running = [worker for worker, code in zip(running, codes, strict=True) if code is None]
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.join(_SECONDS_TO_LEAVE)
            worker.kill()
            worker.join()


def _death(code: int, processes: int) -> UserError:
    """The error for a worker that ended with *code* and did not say why."""
    reason = f"exit status {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            reason = f"killed by {signal.Signals(-code).name}"
    return UserError(
        f"processes: one of {processes} died ({reason}); what is finished is kept: "
        "the same command continues, with fewer --processes if memory is short"
    )


def _leave(number: int, frame: object) -> None:
    """Handle SIGTERM in a worker: exit cleanly, so that semaphores that libraries created are released."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _worker(how: Tokenizing, work: Sequence[tuple[Unit, str]], taken: Any, errors: Any, threads: int) -> None:
    """Take units until none is left, or the main process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process ends the others
    signal.signal(signal.SIGTERM, _leave)
    # Read by the tokenizers library when it first encodes.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    try:
        tokenizer = load_tokenizer(how.tokenizer_folder)
        tokenizer.threads = threads
        while True:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(work):
                return
            how.tokenize(work[number], tokenizer, _leave_alone)
    except UserError as error:
        errors.put(error)
    except MemoryError:
        errors.put(UserError("memory: exhausted while tokenizing; valid: fewer --processes"))
    except OSError as error:
        errors.put(OSError(error.errno, error.strerror or str(error), error.filename))
    sys.exit(1)


def _leave_alone() -> None:
    """Exit if the main process is gone."""
    main = multiprocessing.parent_process()
    if main is not None and not main.is_alive():
        sys.exit(1)
