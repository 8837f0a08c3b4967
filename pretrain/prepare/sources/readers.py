"""Reads documents from files of many, piece by piece: lines, JSON Lines, JSON arrays, CSV; compressed or not.

A document that cannot be used is returned as ``(None, reason)``. Memory is bounded by the longest usable
document, whatever the file holds. (``datasets`` gives up a whole JSON or CSV file for one bad record, makes
text of numbers, changes line ends, and does not cut such files into pieces.)
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.sources.reading import MAX_DOCUMENT_BYTES, Record, check_text, open_stream

DELIMITERS = {"csv": ",", "tsv": "\t"}
# A record may hold other fields, and up to six bytes for a character (\u0416 for two bytes of UTF-8).
_RECORD_FACTOR = 4
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')


@dataclass(frozen=True)
class Limits:
    """What is read from a file; see :class:`pretrain.prepare.sources.files.TextFiles`."""

    column: str = "text"
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    skip_damaged: bool = False

    @property
    def longest_record(self) -> int:
        """Bytes of a record with its other fields."""
        return _RECORD_FACTOR * self.max_document_bytes


def no_column(path: Path, limits: Limits, names: Iterable[str]) -> UserError:
    """The error of a file whose records have these *names*, but not the column."""
    shown = ", ".join(" ".join(name.split())[:60] for name in itertools.islice(names, 20))
    return UserError(
        f"column: the records of {str(path)!r} have no {limits.column!r}; valid: --column with one of "
        f"{shown}, or --format text to take every file as one text"
    )


def read_piece(path: Path, format: str, start: int, stop: int | None, limits: Limits) -> Iterator[Record]:
    """Yield the documents of one piece of a file, in order. *start* and *stop* are byte offsets of lines.

    Raises:
        OSError, EOFError, zlib.error, ValueError: the file is damaged from here on.
        UserError: the file is CSV and lacks the column.
    """
    if not path.stat().st_size:
        yield None, "empty"
    elif format in DELIMITERS:
        yield from _read_csv(path, format, limits)
    elif format == "lines":
        for line in read_lines(path, start, stop, limits.max_document_bytes):
            yield (None, "too_long") if line is None else check_text(line, limits.max_document_bytes)
    else:
        for record in _json_records(path, format, start, stop, limits):
            if record is None or record.strip() or format == "json":
                yield _json_document(record, limits)


def _json_records(
    path: Path, format: str, start: int, stop: int | None, limits: Limits
) -> Iterator[bytes | None]:
    if format == "jsonl":
        yield from read_lines(path, start, stop, limits.longest_record)
        return
    with open_stream(path) as stream:
        yield from read_array(stream, limits.longest_record)


def other_columns(path: Path, format: str, limits: Limits, most: int = 100) -> list[str]:
    """The names that the first *most* records of a JSON file have, or the header of a CSV file; empty if the
    column is among them or a record is text."""
    if format in DELIMITERS:
        with _csv_rows(path, format, limits) as rows:
            header = next(rows, [])
        return [] if limits.column in header else header
    names: dict[str, None] = {}
    for record in itertools.islice(_json_records(path, format, 0, None, limits), most):
        try:
            value = json.loads((record or b"").removeprefix(_BOM))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str) or (isinstance(value, dict) and limits.column in value):
            return []
        if isinstance(value, dict):
            names.update(dict.fromkeys(value))
    return list(names)


def _json_document(record: bytes | None, limits: Limits) -> Record:
    if record is None:
        return None, "too_long"
    try:
        value = json.loads(record.removeprefix(_BOM))
    except UnicodeDecodeError:
        return None, "invalid_utf8"
    except (ValueError, RecursionError):
        return None, "binary" if b"\0" in record else "invalid_json"
    if isinstance(value, str):
        return check_text(value, limits.max_document_bytes)
    if not isinstance(value, dict) or limits.column not in value:
        return None, "missing_column"
    return check_text(value[limits.column], limits.max_document_bytes)


def read_lines(path: Path, start: int, stop: int | None, longest: int) -> Iterator[bytes | None]:
    """Yield lines that begin at bytes ``start … stop - 1``, without line ends; None for one beyond *longest*.

    So each line of a file is read once, wherever the file is cut into pieces.
    """
    with open_stream(path) as stream:
        # A line begins at *start* if the byte before ends one. From there, the first "line" is the end of
        # another.
        position = max(0, start - 1)
        if position:
            stream.seek(position)
        in_piece = start == 0
        line_start, dropped_bytes = b"", 0  # the beginning of the current line; bytes of it not kept
        # read1: read would lose the part of the last chunk that it had read from a truncated .gz.
        while chunk := stream.read1(_CHUNK):
            ends_at = -1
            while (newline := chunk.find(b"\n", ends_at + 1)) >= 0:
                line = line_start + chunk[ends_at + 1 : newline]
                length = dropped_bytes + len(line)
                if in_piece:
                    yield None if length > longest else line.removesuffix(b"\r")
                in_piece, line_start, dropped_bytes = True, b"", 0
                position += length + 1
                ends_at = newline
                if stop is not None and position >= stop:
                    return
            line_start += chunk[ends_at + 1 :]
            if len(line_start) > longest or not in_piece:
                dropped_bytes, line_start = dropped_bytes + len(line_start), b""
                if not in_piece and stop is not None and position + dropped_bytes >= stop:
                    return  # a single line covers this piece, and begins before it
        if in_piece and (line_start or dropped_bytes):
            yield None if dropped_bytes + len(line_start) > longest else line_start.removesuffix(b"\r")


def json_layout(head: bytes) -> str:
    """The layout of a ``.json`` file that begins with *head*: "array", "lines" (of records), "other" or
    "empty"."""
    head = head.removeprefix(_BOM).lstrip()
    if not head:
        return "empty"
    if head.startswith(b"["):
        return "array"
    line, newline, _ = head.partition(b"\n")
    try:
        # Without a line end it is one record, or one that is longer than *head*.
        is_record = isinstance(json.loads(line), dict) if newline else line.startswith(b"{")
    except (ValueError, RecursionError):
        is_record = False
    return "lines" if is_record else "other"


def read_array(stream: Any, longest: int) -> Iterator[bytes | None]:
    """Yield the elements of the JSON array in *stream*, as bytes; None for one beyond *longest* bytes.

    Raises:
        ValueError: no array, one that does not end, or something after it.
    """
    depth, in_string, escaped, closed, any_element = 0, False, False, False, False
    element_start, too_long, first_chunk = b"", False, True
    # read1: read would lose the part of the last chunk that it had read from a truncated .gz.
    while chunk := stream.read1(_CHUNK):
        if first_chunk:
            chunk, first_chunk = chunk.removeprefix(_BOM), False
        position, begin = int(escaped), 0
        escaped = False
        if depth == 0:
            outside = chunk.lstrip(_SPACE)
            if outside and (closed or not outside.startswith(b"[")):
                raise ValueError("something after the array" if closed else "not a JSON array")
        while match := (_IN_STRING if in_string else _STRUCTURE).search(chunk, position):
            at, sign = match.start(), match[0]
            position = at + 1
            if sign == b'"':
                in_string = not in_string
            elif sign == b"\\":
                position = at + 2  # whatever it is, it does not end the string
                escaped = position > len(chunk)
            elif sign in b"[{":
                depth += 1
                if depth == 1:
                    begin = position
            elif sign != b"," or depth == 1:
                depth -= sign != b","
                if sign == b"," or depth == 0:
                    element = element_start + chunk[begin:at]
                    if sign == b"," or any_element or element.strip() or too_long:
                        yield None if too_long or len(element) > longest else element
                    any_element, element_start, too_long, begin = True, b"", False, position
                if depth == 0:
                    closed = True
                    if chunk[position:].strip(_SPACE):
                        raise ValueError("something after the array")
                    break
        if depth:
            element_start += chunk[begin:]
            if len(element_start) > longest:
                element_start, too_long = b"", True
    if not closed:
        raise ValueError("the array does not end")


def _read_csv(path: Path, format: str, limits: Limits) -> Iterator[Record]:
    with _csv_rows(path, format, limits) as rows:
        header = next(rows, [])
        if limits.column not in header:
            raise no_column(path, limits, header)
        column = header.index(limits.column)
        for row in rows:
            if len(row) > len(header):
                yield None, "extra_fields"  # a comma in a text without quotes: the rest of it would be lost
            elif len(row) > column:
                yield check_text(row[column], limits.max_document_bytes)
            elif row:
                yield None, "missing_column"


@contextlib.contextmanager
def _csv_rows(path: Path, format: str, limits: Limits) -> Iterator[Iterator[list[str]]]:
    """The rows of a CSV file (strict RFC 4180), the header first; bytes that are not UTF-8 are kept as
    surrogates.

    Raises:
        ValueError: quotes that do not fit, or a line or field beyond the longest record's characters.
    """
    longest = limits.longest_record
    csv.field_size_limit(longest)
    with open_stream(path) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")

        def lines() -> Iterator[str]:
            while line := text.readline(longest + 1):
                if len(line) > longest:
                    raise ValueError(f"a line of more than {longest} characters")
                yield line

        rows = csv.reader(lines(), delimiter=DELIMITERS[format], strict=True)
        try:
            yield rows
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error
