"""Tokenizes the units of a source in several processes.

Every process takes units one by one, reads and tokenizes them by itself and writes their parts. So only counts pass
between processes, and the output does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.parts import PART_BYTES, Counts, tokenize_unit

_SECONDS_TO_LEAVE = 10.0  # that a terminated process gets before it is killed

Work = Sequence[tuple[Unit, str]]
"""Units still to be done, each with the key of its parts."""


def tokenize_units(
    source: TextSource,
    work: Work,
    folder: Path,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    dtype: np.dtype[Any],
    processes: int,
    report: Callable[[Counts], None],
    unit_done: Callable[[int], bool],
    part_bytes: int = PART_BYTES,
    most_tokens: int | None = None,
) -> None:
    """Tokenize all of *work* into *folder*.

    Args:
        tokenizer_folder: where *tokenizer* is saved, for the other processes.
        processes: 1 works in this process, with the tokenizer's threads. More start this many at most; where there are
            fewer units (one large compressed file), each process uses several threads instead.
        report: called with the counts of every batch.
        unit_done: called with the position in *work* of every unit that was worked on; when it returns True, the rest
            is skipped.
        most_tokens: the rest of a unit is skipped when it has more tokens.

    Raises:
        UserError: a source that cannot be read, or a process that was killed.
    """
    if processes == 1 or not work:
        for position, (unit, key) in enumerate(work):
            tokenize_unit(source, unit, key, folder, tokenizer, dtype, report, part_bytes, most_tokens)
            if unit_done(position):
                return
        return
    count = min(processes, len(work))
    threads = max(1, processes // count)
    # Spawned: a forked child would inherit the locks of threads that run here, and the pipes of its siblings, which
    # then would not notice that this process has died.
    context = multiprocessing.get_context("spawn")
    pool: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            parent_end, worker_end = context.Pipe()
            arguments = (
                worker_end,
                source,
                folder,
                tokenizer_folder,
                dtype,
                threads,
                part_bytes,
                most_tokens,
            )
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            worker_end.close()
            pool[parent_end] = process
        _distribute(pool, work, report, unit_done)
    finally:
        # Terminated before their pipes are closed: closing makes a worker exit, which SIGTERM would interrupt.
        for process in pool.values():
            process.terminate()
        for connection, process in pool.items():
            process.join(_SECONDS_TO_LEAVE)
            if process.exitcode is None:
                process.kill()
                process.join()
            connection.close()


def _leave(number: int, frame: object) -> None:
    """Handle SIGTERM in a worker: exit cleanly, so that semaphores that libraries created are released."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _distribute(
    pool: dict[Connection, Any],
    work: Work,
    report: Callable[[Counts], None],
    unit_done: Callable[[int], bool],
) -> None:
    """Hand out units in order, each to the first process that is free, until all are done."""
    next_position, busy, stopped = 0, 0, False
    for connection, process in pool.items():
        with _death_is_reported(process, len(pool)):
            connection.send((next_position, *work[next_position]))
        next_position, busy = next_position + 1, busy + 1
    while busy:
        for connection in pool.keys() & set(wait(list(pool))):
            with _death_is_reported(pool[connection], len(pool)):
                kind, value = connection.recv()
            if kind == "counts":
                report(value)
            elif kind == "error":
                raise value
            else:
                busy -= 1
                stopped = unit_done(value) or stopped
                if not stopped and next_position < len(work):
                    with _death_is_reported(pool[connection], len(pool)):
                        connection.send((next_position, *work[next_position]))
                    next_position, busy = next_position + 1, busy + 1
        if stopped:
            return


@contextlib.contextmanager
def _death_is_reported(process: Any, processes: int) -> Iterator[None]:
    """Raise UserError if *process* died: the other end of its pipe is gone, on reading or on writing."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        process.join()
        raise UserError(
            f"processes: one of {processes} died ({_exit_reason(process.exitcode)}); what is finished is kept: "
            "the same command continues, with fewer --processes if memory is short"
        ) from None


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _worker(
    connection: Connection,
    source: TextSource,
    folder: Path,
    tokenizer_folder: Path,
    dtype: np.dtype[Any],
    threads: int,
    part_bytes: int,
    most_tokens: int | None,
) -> None:
    """Serve units until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the main process ends the others
    signal.signal(signal.SIGTERM, _leave)
    # Read by the tokenizers library when it first encodes.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            tokenizer = load_tokenizer(tokenizer_folder)
            tokenizer.threads = threads
            while True:
                position, unit, key = connection.recv()
                report = _sender(connection)
                tokenize_unit(source, unit, key, folder, tokenizer, dtype, report, part_bytes, most_tokens)
                connection.send(("done", position))
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise  # the main process is gone
        except UserError as error:
            connection.send(("error", error))
        except MemoryError:
            connection.send(
                ("error", UserError("memory: exhausted while tokenizing; valid: fewer --processes"))
            )
        except OSError as error:
            connection.send(("error", OSError(error.errno, error.strerror or str(error), error.filename)))


def _sender(connection: Connection) -> Callable[[Counts], None]:
    def send(counts: Counts) -> None:
        connection.send(("counts", counts))

    return send
