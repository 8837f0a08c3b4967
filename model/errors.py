"""UserError, the exception for bad input, and functions that format its message."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LONGEST_LINE = 2000
NEAR = 0.75


class UserError(ValueError):
    """Bad input: ``str(error)`` is a one-line message with the field, the value and what would be valid.

    Commands catch it, print ``error: <line>`` and end with exit code 2, without a traceback. The middle of a
    line that quotes a very long value is left out.
    """

    def __str__(self) -> str:
        return _shorten(escape_controls(super().__str__()), LONGEST_LINE)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook in place of a traceback."""
        return [f"error: {self}"]


class MachineError(UserError):
    """A line about machines or other jobs, not about what the user gave: another try may work.

    Training ends with exit code 1, after which a job is requeued.
    """


class DivergedError(UserError):
    """A message about a training that diverged: it would again. Training ends with exit code 3."""


@contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Add the field and its value to a UserError that does not have them."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}: {quote(value)} is not valid; {error}") from None


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid name nearest to *name*, or ``""`` if none is near.

    Near is a ratio of NEAR or more of the characters in common (difflib's): one letter in four is wrong at
    most.
    """
    matches = difflib.get_close_matches(name, [known for known in valid if known != name], n=1, cutoff=NEAR)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def quote(value: Any, limit: int = 80, plain: bool = False) -> str:
    """Return *value* as a message quotes it: its repr, or its str if *plain*; the middle of a long one is
    left out.

    Line ends and control characters are written as in a repr in any case.
    """
    try:
        text = str(value) if plain else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or levels
        text = f"a value of type {type(value).__name__} that is too long"
    text = escape_controls(text)
    return _shorten(text, limit)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 4 :]}"


def escape_controls(text: str, kept: str = "") -> str:
    """Return *text* with line ends, control characters and lone surrogates written as in a repr; the
    characters in *kept* stay."""
    return "".join(
        character if character.isprintable() or character in kept else repr(character)[1:-1]
        for character in text
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending; found in sqrt(number) trials, so that it is quick for any size of a model."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return small + [number // count for count in reversed(small) if count * count != number]


def describe_nearest(value: int, valid: Sequence[int]) -> str:
    """The valid positive values next to *value* from below and above, as text."""
    below = [count for count in valid if 1 <= count <= value]
    above = [count for count in valid if count > value]
    found = ([max(below)] if below else []) + ([min(above)] if above else [])
    return " or ".join(map(str, found)) or "none"
