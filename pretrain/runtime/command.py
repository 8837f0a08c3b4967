"""How a command begins and ends: prepare_process makes it independent of its environment, run_command ends it
with an exit code and, after bad input, a one-line error."""

from __future__ import annotations

import contextlib
import errno
import locale
import os
import sys
import tempfile
from collections.abc import Callable, Sequence

from model.errors import MachineError, UserError, quote
from pretrain.runtime.environment import environment_rank, environment_size
from pretrain.utils.env_check import explain_missing, keep_compiled_code_private, set_aside_compile_cache
from pretrain.utils.stdio import print_any_text

FAILED = 1
"""Exit codes: after an error that the user's input did not cause, after bad input, after Ctrl-C, and when the
reader of the output has closed it."""
BAD_INPUT = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141
NOTHING_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a file system that is full, or read only."""


def run_command(
    command: Callable[[list[str]], object],
    arguments: Sequence[str] | None,
    interrupted: str = "interrupted",
) -> int:
    """Run a command; if it ends early, print why in a one-line message. Of several ranks of a launcher, the
    first to fail prints it and ends the process (exit.end_after).

    Args:
        command: takes the command line, without the program's name.
        arguments: the command line; None takes the process's own.
        interrupted: printed after Ctrl-C.

    Returns:
        The exit code: 0; 2 for bad input (see bad_input); 1 for a MachineError; 130 after Ctrl-C; 141 when
        the reader of the output has closed it (``| head``).
    """
    if arguments is None:
        prepare_process()
    try:
        command(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        code, line = INTERRUPTED, f"\n{interrupted}"
    except Exception as error:
        if arguments is None and environment_size() > 1:
            from pretrain.runtime.exit import end_after

            end_after(error, environment_rank())
        if (refusal := bad_input(error)) is None:
            raise
        code, line = failure_code(refusal), f"error: {refusal}"
    if environment_rank() == 0:
        print(line, file=sys.stderr)
    return code


def failure_code(error: BaseException) -> int:
    """The exit code after *error*: BAD_INPUT for what the user gave, FAILED for all else (a MachineError)."""
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


def prepare_process() -> None:
    """Prepare a program's own process, before it imports anything heavy.

    Libraries read files in the encoding of the locale: where that is not UTF-8, the program starts again in
    Python's UTF-8 mode, in the same process. A character that the terminal does not have is printed as its
    number. torch's C++ prints pages of frames for a rank that is gone, which gets a line here. OpenMP's
    threads sleep while they wait, unless OMP_WAIT_POLICY is set: with one other busy process, spinning
    threads lose two thirds of a run's speed (docs/performance.md).
    """
    other = locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
    if other and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    print_any_text()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    set_aside_compile_cache()
    with contextlib.suppress(UserError):  # raised again where something is compiled
        keep_compiled_code_private()
