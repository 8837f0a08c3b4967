"""UserError, the exception for bad input; run_command, which ends a command with an exit code; and
prepare_process, which makes a program independent of its environment."""

from __future__ import annotations

import difflib
import importlib.util
import io
import locale
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
LONGEST_LINE = 2000
NEAR = 0.75
SET_ASIDE: dict[str, str] = {}
"""What prepare_process has taken out of the environment."""


class UserError(ValueError):
    """Bad input: ``str(error)`` is one line naming the field, the value and what would be valid.

    Commands catch it, print ``error: <line>`` and end with exit code 2, without a traceback. The middle of a
    line that quotes a very long value is left out.
    """

    def __str__(self) -> str:
        return _shortened(printable(super().__str__()), LONGEST_LINE)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook in place of a traceback."""
        return [f"error: {self}"]


EXTRAS = {
    "accelerate": "eval",
    "datasets": "data",
    "gcsfs": "gcs",
    "jinja2": "study",
    "lm_eval": "eval",
    "s3fs": "s3",
    "statsmodels": "study",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Packages that a bare install lacks, each with the extra of this project that brings it."""


def not_installed(package: str) -> UserError:
    """What to install to have a package of EXTRAS."""
    return UserError(f"{package}: not installed; pip install 'head-schedules[{EXTRAS[package]}]'")


def check_installed(package: str, setting: str) -> None:
    """Refuse a setting that needs a package of EXTRAS.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{setting}: {not_installed(package)}, or leave it out")


def missing_extra(error: BaseException) -> UserError | None:
    """What to install, if *error* is the failed import of a package in EXTRAS."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return not_installed(package) if package in EXTRAS else None


def run_command(
    command: Callable[[list[str]], object],
    arguments: Sequence[str] | None,
    interrupted: str = "interrupted",
) -> int:
    """Run a command and print in one line what ended it early; of several ranks only rank 0 prints.

    Args:
        command: takes the command line, without the program's name.
        arguments: the command line; None takes the process's own.
        interrupted: printed after Ctrl-C.

    Returns:
        The exit code: 0; 2 for bad input, files that cannot be read or written, and packages of EXTRAS that
        are missing; 130 after Ctrl-C; 141 when the reader of the output has closed it (``| head``).
    """
    if arguments is None:
        prepare_process()
    try:
        command(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return 0
    except UserError as error:
        code, line = 2, f"error: {error}"
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        code, line = 2, f"error: {missing}"
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno is None:
            raise  # raised by a library, not by the file system
        where = f"{error.filename}: " if error.filename else ""
        code, line = 2, f"error: {printable(f'{where}{error.strerror}')}"
    except KeyboardInterrupt:
        code, line = INTERRUPTED, f"\n{interrupted}"
    if not _is_a_later_rank():
        print(line, file=sys.stderr)
    return code


def _is_a_later_rank() -> bool:
    """Whether this process is one of several ranks, and not the first."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    numbers = rank.isdecimal() and size.isdecimal() and len(rank + size) < 20
    return numbers and 0 < int(rank) < int(size)


def prepare_process() -> None:
    """Prepare a program's own process, before it imports anything heavy.

    Libraries read files in the encoding of the locale: where that is not UTF-8, the program starts again in
    Python's UTF-8 mode, in the same process. A character that the terminal does not have is printed as its
    number. torch makes its folder for compiled code when it is imported: one that cannot be used is no
    obstacle until something is compiled. And its C++ prints pages of frames for a rank that is gone, which
    gets a line here.
    """
    other = locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
    if other and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    print_any_text()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ and folder_problem(os.environ[name]):
        SET_ASIDE[name] = os.environ.pop(name)


def folder_problem(path: str) -> str | None:
    """Why nothing can be written into a folder, which is made; None if something can."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        return f"it cannot be made ({error.strerror}); give a folder that can be written"
    return None if usable else "it cannot be written; give another folder"


def print_any_text() -> None:
    """Let standard output and error take any text: what their encoding lacks is written with backslashes."""
    for name in ("stdout", "stderr"):
        # None: it was closed when Python began.
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def closest(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid name nearest to *name*, or ``""`` if none is near.

    Near is a ratio of NEAR or more of the characters in common (difflib's): one letter in four is wrong at
    most.
    """
    matches = difflib.get_close_matches(name, [known for known in valid if known != name], n=1, cutoff=NEAR)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def shown(value: Any, limit: int = 80, plain: bool = False) -> str:
    """Return *value* as a message quotes it: its repr, or its str if *plain*; the middle of a long one is
    left out.

    Line ends and control characters are written as in a repr in any case.
    """
    try:
        text = str(value) if plain else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or levels
        text = f"a value of type {type(value).__name__} that is too long"
    text = printable(text)
    return _shortened(text, limit)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 4 :]}"


def printable(text: str, kept: str = "") -> str:
    """Return *text* with line ends, control characters and lone surrogates written as in a repr; the
    characters in *kept* stay."""
    return "".join(
        character if character.isprintable() or character in kept else repr(character)[1:-1]
        for character in text
    )
