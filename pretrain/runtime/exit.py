"""How a process ends after an error: its exit code, the message for bad input, and, of several ranks, which
one prints what went wrong.

Ranks that lose another rank fail a moment later, with a library's message. They are recognized without
reading such messages: the first rank to fail writes its number to the process group's store, and a rank that
finds a number there prints nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

from model.errors import DivergedError, MachineError, UserError, quote
from pretrain.utils.env_check import explain_missing

FAILED = 1
"""Exit codes: after an error that the user's input did not cause, after bad input, of a training that
diverged, after Ctrl-C, and when the reader of the output has closed it."""
BAD_INPUT = 2
DIVERGED = 3
INTERRUPTED = 130
OUTPUT_CLOSED = 141
NOTHING_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a file system that is full, or read only."""

KEY = "head_schedules/first_failure"
DONE_KEY = "head_schedules/rank_0_is_done"
# Rank 0 gives wandb up to a minute; no rank waits longer than this for a rank 0 that hangs.
DONE_SECONDS = 90.0
# Rank 0 prints errors that all ranks have found together: the others wait this long, so that it is first.
HEAD_START_SECONDS = 0.5
# A launcher ends the other ranks within seconds; a rank that still runs after that prints its error.
WAIT_SECONDS = 5.0
STORE_TIMEOUT = timedelta(seconds=5)


def failure_code(error: BaseException) -> int:
    """The exit code after *error*: BAD_INPUT for what the user gave, DIVERGED, or FAILED for all else (a
    MachineError)."""
    if isinstance(error, DivergedError):
        return DIVERGED
    return BAD_INPUT if isinstance(error, UserError) and not isinstance(error, MachineError) else FAILED


def bad_input(error: BaseException) -> UserError | None:
    """Return *error* as bad input, if it is: a UserError, a file that cannot be read or written, a disk that
    is full, also for a child process such as a compiler, or the failed import of a package of EXTRAS.

    Other errors of the system, such as a library's lost connection, name no file.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and (error.filename or error.errno in NOTHING_MORE):
        where = f"{quote(str(error.filename), 200, plain=True)}: " if error.filename else ""
        return UserError(f"{where}{error.strerror}")
    return _find_full_disk(error) or explain_missing(error)


def _find_full_disk(error: BaseException) -> UserError | None:
    """*error*, if its text reports that something could not be written: a library raises with the output of
    the process that met NOTHING_MORE, or with a message for it."""
    for line in str(error).splitlines():
        if any(os.strerror(number) in line for number in NOTHING_MORE):
            return UserError(
                f"{quote(line.strip(), 200, plain=True)}; temporary files are in {tempfile.gettempdir()}: "
                "make room there, or set TMPDIR to another folder"
            )
    return None


def end_after(error: BaseException, rank: int, wait: float = WAIT_SECONDS) -> NoReturn:
    """Print how this rank failed, if it is the first, and end the process.

    Bad input gives a one-line error and the code of failure_code, as in the other commands (run_command);
    anything else this rank's traceback and FAILED. Messages of ranks other than 0 name the rank and its host.
    A rank that is not the first ends with the first one's code.
    """
    error = bad_input(error) or error
    code = failure_code(error)
    store = _store()
    if store is None:
        _end_alone(error, rank, code, wait)
    if rank:
        time.sleep(HEAD_START_SECONDS)
    first = _first_failure(store, rank, code)
    if first == (rank, code):
        _print(_text(error, rank))
    elif first is not None:
        code = first[1]
    else:  # rank 0, which hosts the store, has ended
        _leave_time_to_the_launcher(wait, code)
        _print(f"error: {_where(rank)} lost rank 0, which ended first ({quote(error, 200, plain=True)})\n")
    # Not sys.exit: on the way out, process groups would wait for ranks that no longer answer.
    os._exit(code)


def leave_after_rank_0(rank: int, seconds: float = DONE_SECONDS) -> None:
    """Return on rank 0 at once, and on the others when rank 0 has called this too or *seconds* have passed.

    A launcher ends all ranks when one leaves with a code other than 0, as after a request to stop; rank 0 may
    have a picture to draw and wandb to close then.
    """
    store = _store()
    if store is None:
        return
    with contextlib.suppress(Exception):  # of any class: rank 0, which hosts the store, may have ended
        if rank == 0:
            store.set(DONE_KEY, "")
        else:
            store.wait([DONE_KEY], timedelta(seconds=seconds))


def leave(rank: int, code: int) -> NoReturn:
    """End this process with *code*, after rank 0 if there are several ranks.

    Those do not use sys.exit: threads of a process group may still run while the interpreter takes libraries
    down, and abort a rank that has saved everything.
    """
    leave_after_rank_0(rank)
    sys.unraisablehook = lambda _: None  # libraries that fail to close: what was to be saved is saved
    if _store() is None:
        _close_group()
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _close_group() -> None:
    """Close the group of a GPU's only rank, as NCCL asks for."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_backend() == "nccl":
        with contextlib.suppress(Exception):  # what was to be saved is saved
            distributed.destroy_process_group()


def _end_alone(error: BaseException, rank: int, code: int, wait: float) -> NoReturn:
    """End a rank that is not connected to the others.

    Rank 0 prints an error that all ranks have; the first rank of a node prints an error of that node.
    """
    if not isinstance(error, UserError) or rank == 0:
        _print(_text(error, rank))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _leave_time_to_the_launcher(wait, code)
        _print(_text(error, rank))
    sys.exit(code)


def _leave_time_to_the_launcher(seconds: float, code: int) -> None:
    """Wait for the launcher's SIGTERM, which follows another rank's failure, and then end with *code*,
    silently."""
    with contextlib.suppress(ValueError):  # only the main thread may set a handler
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(seconds)


def _store() -> Any:
    """The key-value store of the process group; None without a group, or where this rank is the only one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()  # torch has no public name for it


def _first_failure(store: Any, rank: int, code: int) -> tuple[int, int] | None:
    """Rank and exit code of the rank that failed first, which may be this one; None when the store is
    gone."""
    try:
        store.set_timeout(STORE_TIMEOUT)
        first = store.compare_set(KEY, "", f"{rank} {code}").decode().split()
    except Exception:  # of any class: torch's differ by version and cause
        return None
    return int(first[0]), int(first[1])


def _text(error: BaseException, rank: int) -> str:
    if isinstance(error, UserError):
        return f"error: {_where(rank) + ': ' if rank else ''}{error}\n"
    return "".join([f"error: {_where(rank)} failed:\n", *traceback.format_exception(error)])


def _where(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _print(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
