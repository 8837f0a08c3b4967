"""Reads and writes metrics.jsonl: one JSON object a line, a line a step, written as soon as it is known.

The trainer alone writes it. Scores of checkpoints that another process computes are in evaluation.jsonl, of
the same form; whoever reads a run's folder reads both.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Literal, Required, cast

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from model.declared import NonNegativeInt
from model.errors import UserError, quote
from pretrain.utils.files import atomic_file, open_regular

FILE_NAME = "metrics.jsonl"
EVALUATION_NAME = "evaluation.jsonl"
OF_SCORES = ("checkpoint", "scored")
"""Names in its rows that describe what was scored, and how; they are not metrics."""
OF_TRAINER = {"step", "tokens", "seconds", "skipped", "train_loss", "grad_norm", "tokens_per_second"}
"""Names that no hook may use."""
TAIL = 1 << 20
"""Bytes at the end of a file that hold at least one whole row."""
MOST_BYTES = 1 << 24
"""Of a line; a row of a thousand layers has a hundredth of that."""
CHUNK = 1 << 10
"""Rows that are held as objects at a time while columns are made of them."""
# JSON has no word for these; as strings, float() reads them back and so does every data frame library.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Number = NonNegativeInt | float | Literal["NaN", "Infinity", "-Infinity"]


@with_config(ConfigDict(strict=True))
class HasStep(TypedDict):
    """What makes a line a row."""

    step: NonNegativeInt


@with_config(ConfigDict(strict=True, allow_inf_nan=False))
class Row(TypedDict, total=False, extra_items=Number):  # type: ignore[call-arg]  # PEP 728
    """A row as all commands read it. Names that end in /heads, and names of others without a slash, may hold
    anything."""

    step: Required[NonNegativeInt]
    tokens: NonNegativeInt
    train_loss: Number
    z_loss: Number
    val_loss: Number
    val_bpb: Number
    val_accuracy: Number
    grad_norm: Number
    tokens_per_second: Number


_HAS_STEP, _ROW = TypeAdapter(HasStep).validator, TypeAdapter(Row).validator


class MetricsFile:
    """A file of JSON objects, one a line and a step, written as soon as it is known.

    Args:
        path: the file; it is created with the first row.
        report: where to say that rows cannot be written.
        then: what happens nevertheless.
    """

    def __init__(
        self, path: Path, report: Callable[[str], object] = print, then: str = "training continues"
    ) -> None:
        self.path = path
        self.incomplete = False
        """Whether the last rows could not be written."""
        self._report, self._then = report, then
        self._file: IO[bytes] | None = None
        self._failed = False
        self._rows: list[dict[str, Any]] = []
        """The newest row, to which values of its step are added, and before it those that a full disk did
        not take."""
        self._place: int | None = None
        """Where in the file those rows begin; None: at its end."""

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Write a row, or add values to the newest one if it is of the same step. A full disk is reported
        once, and does not end the training; rows wait in memory."""
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step})
        self._rows[-1] |= {key: encode(to_plain_value(value)) for key, value in row.items()}
        lines = [json.dumps(each).encode() + b"\n" for each in self._rows]
        try:
            if self._file is None:
                self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
            if self._place is None:
                self._place = self._file.seek(0, os.SEEK_END)
            # What lies there begins in the same way: no row is lost if the process ends meanwhile.
            self._file.seek(self._place)
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
            self._file.truncate()
            self._place, self._rows = self._place + sum(map(len, lines[:-1])), self._rows[-1:]
            self.incomplete = False
        except OSError as error:
            self.incomplete = True
            if not self._failed:
                self._report(f"warning: cannot write {self.path} ({error.strerror}); {self._then}")
            self._failed = True

    def truncate_after(self, step: int) -> int:
        """Drop the rows after *step* and lines that are not rows; return how many were dropped.

        What remains replaces the file at once: an interruption leaves the old file or the new one.

        Raises:
            UserError: the path is not that of a file that can be read.
        """
        self.close()
        self._rows, self._place, last = [], None, b""
        size = dropped = 0
        for line in _lines(self.path):
            if 0 <= _read_step(line) <= step:
                last = line
                size += len(line)
            else:
                dropped += 1
        if dropped or (size and size != self.path.stat().st_size):  # or the last line lacks its end
            kept = (line for line in _lines(self.path) if 0 <= _read_step(line) <= step)
            with atomic_file(self.path) as partial, partial.open("wb") as file:
                file.writelines(kept)
        if _read_step(last) == step:
            with contextlib.suppress(ValueError):  # a number of too many digits stays as it is
                self._rows, self._place = [json.loads(last)], size - len(last)
        return dropped

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # said before
                self._file.close()
            self._file = None


def open_metrics(path: Path) -> IO[bytes] | None:
    """Open a metrics file for reading, as every command does it; None if there is none.

    Args:
        path: the file, or the run's folder.

    Raises:
        UserError: a folder, pipe, device or loop of links in its place, or a file that cannot be read.
    """
    try:
        return open_regular(_find_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"metrics: {error.filename}: {error.strerror}; give the {FILE_NAME} of a run"
        ) from None


def read_metrics(path: str | Path, of_few: bool = True) -> list[dict[str, Any]]:
    """Return the rows of a metrics file in order of step, with rows of the same step merged into one; none
    without a file. Lines that are not rows, such as a half-written last one, are left out.

    Args:
        path: the file, or the run's folder.
        of_few: whether to take scores of a few items (``evaluate --limit``) where there are no others.

    Raises:
        UserError: as open_metrics; a value that is not a number.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in _rows(Path(path), of_few):
        merged.setdefault(row["step"], {}).update({key: _decode(value) for key, value in row.items()})
    return [merged[step] for step in sorted(merged)]


class Columns:
    """The values of a metrics file by name: 8 bytes for each value, and 8 for each row.

    Raises:
        UserError: as read_metrics.
    """

    def __init__(self, path: Path) -> None:
        self._parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        rows = _rows(path)
        while chunk := list(itertools.islice(rows, CHUNK)):
            steps = np.array([row["step"] for row in chunk])
            for name in dict.fromkeys(itertools.chain.from_iterable(chunk)):
                with contextlib.suppress(TypeError, ValueError):  # no number, but a list or text
                    try:
                        at, values = steps, np.array([*map(itemgetter(name), chunk)], np.float64)
                    except KeyError:  # not in every row
                        held = [(row["step"], row[name]) for row in chunk if name in row]
                        at, values = (np.array(part) for part in zip(*held, strict=True))
                        values = values.astype(np.float64)
                    self._parts.setdefault(name, []).append((at, values))

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin with *prefix*, in the order of the file."""
        return [name for name in self._parts if name.startswith(prefix)]

    def __getitem__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps int64 and values float64 of the rows that have the value, in order of step; a step's last
        value counts."""
        parts = self._parts.get(name) or [(np.empty(0, np.int64), np.empty(0))]
        steps, values = map(np.concatenate, zip(*parts, strict=True))
        if not (np.diff(steps) > 0).all():
            steps, index = np.unique(steps[::-1], return_index=True)
            values = values[::-1][index]
        return steps, values

    def over_tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and values, both float64, of the steps that have the value and tokens."""
        (steps, values), (counted, tokens) = self[name], self["tokens"]
        known = np.isin(steps, counted)
        return tokens[np.searchsorted(counted, steps[known])], values[known]


def last_step(path: Path) -> int:
    """The step of the newest row, from the end of the file alone; 0 without a row. Raises as open_metrics."""
    with open_metrics(path) or io.BytesIO() as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return next((step for line in reversed(file.readlines()) if (step := _read_step(line)) >= 0), 0)


def to_plain_value(value: Any) -> Any:
    """Return a Python number for a one-element tensor or NumPy value, anything else unchanged."""
    return value.item() if hasattr(value, "item") else value


def _find_file(path: Path) -> Path:
    return path if path.name == FILE_NAME or not path.is_dir() else path / FILE_NAME


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that the file has now, each with its end; a run may still append to it.

    Raises:
        UserError: a line is longer than any row, and so may be all that follows.
    """
    with open_metrics(path) or io.BytesIO() as file:
        left = file.seek(0, os.SEEK_END)
        file.seek(0)
        for number in itertools.count(1):
            if left <= 0 or not (line := file.readline(MOST_BYTES + 1)):
                return
            if len(line) > MOST_BYTES:
                raise UserError(
                    f"metrics: {_find_file(path)}, line {number} has more than {MOST_BYTES:,} bytes and is "
                    "no row; remove what follows the last row"
                )
            left -= len(line)
            yield line.removesuffix(b"\n") + b"\n"


def _read_step(line: bytes) -> int:
    """The step of the row that *line* holds; -1 if it holds none."""
    try:
        return _HAS_STEP.validate_json(line)["step"]
    except ValidationError:
        return -1


def _rows(path: Path, of_few: bool = True) -> Iterator[dict[str, Any]]:
    """The rows in the order of the file; of a run's folder also those of evaluation.jsonl, up to the step
    that the run has reached. Those of a few items (--limit) come first, so that no score of all items is
    replaced by theirs. Raises UserError for a value that is not a number."""
    few, of_all = list[dict[str, Any]](), list[dict[str, Any]]()
    if (path / EVALUATION_NAME).exists():
        reached = last_step(path)
        for row in read_rows(path / EVALUATION_NAME):
            if row["step"] <= reached:
                (of_all if _settings(row).get("limit") is None else few).append(row)
    yield from _scores_alike(few) if of_few else ()
    yield from read_rows(path)
    yield from _scores_alike(of_all)


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the scores of a row of evaluation.jsonl depend on."""
    settings = row.get("scored")
    return settings if isinstance(settings, dict) else {}


def _scores_alike(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows without what is OF_SCORES, and without scores that were computed with other few-shot
    examples or in another dtype than the newest of the same name: they are no points of its curve."""
    computed = [(row, tuple(_settings(row).get(name) for name in ("num_fewshot", "dtype"))) for row in rows]
    newest = {name: how for row, how in computed for name in row if "/" in name}
    for row, how in computed:
        names = [name for name in row if name not in OF_SCORES and newest.get(name, how) == how]
        yield {name: row[name] for name in names}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file as they were written. Raises UserError for a value that is not a number."""
    for number, line in enumerate(_lines(path), 1):
        try:
            yield cast(dict[str, Any], _ROW.validate_json(line))
        except ValidationError:
            if _read_step(line) >= 0:
                where = f"metrics: {_find_file(path)}, line {number}"
                yield _check_row(from_json(line), where, "give a number, or take the line out")


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Check values that a row is to have, before they are written. Tensors of one element are not read.

    Raises:
        UserError: one that is no number, or has a name of the trainer's; it begins with *where*.
    """
    if not values:  # those of most hooks before a step
        return
    for name in OF_TRAINER & values.keys():
        raise UserError(f"{where}: {name!r} is a value of the trainer's; give it another name")
    known = {name: 0.0 if getattr(value, "ndim", None) == 0 else value for name, value in values.items()}
    try:
        row = encode(known)
        json.dumps(row)
    except (RuntimeError, TypeError, ValueError) as error:  # an array of several elements; what JSON has not
        raise UserError(f"{where}: a value of {', '.join(values)} is no number ({error})") from None
    _check_row({"step": 0, **row}, where, "give a number, or leave the value out")


def _check_row(row: dict[str, Any], where: str, valid: str) -> dict[str, Any]:
    numbers = {key: value for key, value in row.items() if key in Row.__annotations__ or "/" in key}
    numbers = {key: value for key, value in numbers.items() if not key.endswith("/heads")}
    try:
        return row | _ROW.validate_python(numbers)
    except ValidationError as error:
        key = error.errors(include_url=False)[0]["loc"][0]
        raise UserError(f"{where}: {key}: {quote(numbers[str(key)])} is not valid; {valid}") from None


def encode(value: Any) -> Any:
    """*value* with the words of NON_FINITE in place of numbers that JSON has no word for, and with numbers in
    place of NumPy's and of truth values, at any depth."""
    value = to_plain_value(value)
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
