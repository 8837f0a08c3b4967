"""How a command begins and ends: prepare_process makes it independent of its environment, run_command ends it
with an exit code and, after bad input, a one-line error."""

from __future__ import annotations

import contextlib
import locale
import os
import sys
from collections.abc import Callable, Sequence

from model.errors import UserError
from pretrain.runtime.environment import environment_rank, environment_size
from pretrain.runtime.exit import INTERRUPTED, OUTPUT_CLOSED, bad_input, end_after, failure_code
from pretrain.utils.env_check import keep_compiled_code_private, set_aside_compile_cache
from pretrain.utils.stdio import print_any_text


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
        The exit code: 0; 2 for bad input (see exit.bad_input); 1 for a MachineError; 130 after Ctrl-C; 141
        when the reader of the output has closed it (``| head``).
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
            end_after(error, environment_rank())
        if (refusal := bad_input(error)) is None:
            raise
        code, line = failure_code(refusal), f"error: {refusal}"
    if environment_rank() == 0:
        print(line, file=sys.stderr)
    return code


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
