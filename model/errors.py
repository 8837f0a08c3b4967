"""UserError, the exception for bad input, and run_command, which ends a command with an exit code."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
LONGEST_LINE = 2000
NEAR = 0.75


class UserError(ValueError):
    """Bad input: ``str(error)`` is one line naming the field, the value and what would be valid.

    Commands catch it, print ``error: <line>`` and end with exit code 2, without a traceback. The middle of a
    line that quotes a very long value is left out.
    """

    def __str__(self) -> str:
        return _shortened(printable(super().__str__()), LONGEST_LINE)


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
        The exit code: 0; 2 for bad input, and for files that cannot be read or written; 130 after Ctrl-C; 141
        when the reader of the output has closed it (``| head``).
    """
    try:
        command(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return 0
    except UserError as error:
        code, line = 2, f"error: {error}"
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno is None:
            raise  # raised by a library, not by the file system
        where = f"{error.filename}: " if error.filename else ""
        code, line = 2, f"error: {where}{error.strerror}"
    except KeyboardInterrupt:
        code, line = INTERRUPTED, f"\n{interrupted}"
    if os.environ.get("RANK", "0").strip("0123456789") or int(os.environ.get("RANK") or "0") == 0:
        print(line, file=sys.stderr)
    return code


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
