"""The one exception that stands for bad input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: ``str(error)`` is one line naming the field, the value and what would be valid.

    Commands catch it, print ``error: <line>`` and end with exit code 2, without a traceback.
    """


def closest(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid name nearest to *name*, or ``""`` if none is near."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
