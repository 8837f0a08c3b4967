"""Reads and writes metrics.jsonl: one JSON object a line, each written whole as soon as it is known."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from model.declared import LARGEST_INTEGER
from pretrain.utils.files import read_tail, write_atomically

FILE_NAME = "metrics.jsonl"
TAIL = 1 << 16
"""Bytes at the end of a file that hold at least one whole row."""
# JSON has no word for these; as strings, float() reads them back and so does every data frame library.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """A file of JSON objects, one a line, each written whole as soon as it is known.

    Args:
        path: the file; it is created with the first row.
        report: where to say that rows cannot be written.
    """

    def __init__(self, path: Path, report: Callable[[str], object] = print) -> None:
        self.path = path
        self._report = report
        self._file: BinaryIO | None = None
        self._failed = False

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Write one row. A full disk is reported once, and does not end the training; rows wait in memory."""
        line = json.dumps({"step": step, **{key: encoded(plain(value)) for key, value in row.items()}})
        try:
            if self._file is None:
                self._file = self.path.open("ab")
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            if not self._failed:
                self._report(f"warning: cannot write {self.path} ({error.strerror}); training goes on")
            self._failed = True

    def truncate_after(self, step: int) -> int:
        """Drop the rows after *step* and lines that are not rows; return how many were dropped.

        What remains replaces the file at once: an interruption leaves the old file or the new one.
        """
        self.close()
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return 0
        kept_lines, dropped = [], 0
        for line in filter(None, lines):
            row = _parse(line)
            if row is not None and row["step"] <= step:
                kept_lines.append(line + b"\n")
            else:
                dropped += 1
        if dropped or (lines and lines[-1]):  # the last line lacks its end
            write_atomically(self.path, b"".join(kept_lines))
        return dropped

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # said before
                self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file in order of step, with rows of the same step merged into one.

    *path* may be the run's folder. Lines that are not rows, such as a half-written last one, are left out.
    """
    path = path / FILE_NAME if path.is_dir() else path
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        row = _parse(line)
        if row is not None:
            merged.setdefault(row["step"], {}).update({key: _decode(value) for key, value in row.items()})
    return [merged[step] for step in sorted(merged)]


def last_step(path: Path) -> int:
    """The step of the newest row, from the end of the file alone; 0 without a row."""
    try:
        lines = read_tail(path, TAIL).split(b"\n")
    except OSError:
        return 0
    return next((row["step"] for line in reversed(lines) if (row := _parse(line)) is not None), 0)


def plain(value: Any) -> Any:
    """Return a Python number for a one-element tensor or NumPy value, anything else unchanged."""
    return value.item() if hasattr(value, "item") else value


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row that *line* holds, or None if it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and 0 <= step <= LARGEST_INTEGER else None


def encoded(value: Any) -> Any:
    """*value* with the words of NON_FINITE in place of numbers that JSON has no word for, at any depth."""
    if isinstance(value, dict):
        return {str(key): encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
