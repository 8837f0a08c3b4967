"""Checks of the one-line errors for bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from model.errors import UserError


@contextlib.contextmanager
def refused(*words: str, begins: str = "") -> Iterator[None]:
    """What runs inside raises a one-line UserError that begins with *begins* and contains *words*."""
    with pytest.raises(UserError) as caught:
        yield
    line = str(caught.value)
    assert line.startswith(begins) and all(word in line for word in words) and "\n" not in line, line


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: object) -> str:
    """The one-line error that a command prints for bad input."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]
