"""What a process prints: it survives a lost terminal, and a failure that costs nothing becomes a note."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError, quote
from pretrain.utils.env_check import explain_missing
from pretrain.utils.format import log_line


def print_any_text() -> None:
    """Let standard output and error take any text: what their encoding lacks is written with backslashes."""
    for name in ("stdout", "stderr"):
        # None: it was closed when Python began.
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


class _LastingFile(io.FileIO):
    """Drops what cannot be written: to a pipe without a reader, a terminal that has gone, a full disk."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def outlive_output() -> None:
    """Let this process continue when nobody reads its standard output or error any more, or when their disk
    is full."""
    print_any_text()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        file: Any = _LastingFile(stream.fileno(), "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


@contextmanager
def note_errors(what: str, say: Callable[[str], object]) -> Iterator[None]:
    """Make a note of an error in the block, which then ends; for what comes after everything is saved."""
    try:
        yield
    except Exception as raised:
        error = explain_missing(raised) or raised
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        say(log_line("note", f"no {what}, everything is saved ({kind}{quote(error, 300, plain=True)})"))
