"""Reads documents from files of many: lines, JSON Lines, JSON arrays, CSV; compressed or not.

Each reader splits an open file into records, and turns every record into a document or the reason why it is
none. Memory is bounded by the longest usable document, whatever the file holds. (``datasets`` gives up a
whole JSON or CSV file for one bad record, makes text of numbers, changes line ends, and does not cut such
files into pieces.)
"""

from __future__ import annotations

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
_SIGNS = re.compile(rb'\\.|["\[\]{},]', re.DOTALL)  # an escaped quotation mark ends no string


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
    longest = limits.max_document_bytes
    if not path.stat().st_size:
        yield None, "empty"
        return
    with open_stream(path) as stream:
        if format in DELIMITERS:
            rows = _csv_rows(stream, format, limits)
            header = next(rows, [])
            if limits.column not in header:
                raise no_column(path, limits, header)
            yield from (_field(row, header, limits) for row in rows if row)
        elif format == "lines":
            for line in read_lines(stream, start, stop, longest):
                yield (None, "too_long") if line is None else check_text(line, longest)
        else:
            yield from (
                _json_document(record, limits) for record in _json(stream, format, start, stop, limits)
            )


def other_columns(path: Path, format: str, limits: Limits, most: int = 100) -> list[str]:
    """The names that the first *most* records of a JSON file have, or the header of a CSV file; empty if the
    column is among them or a record is text."""
    names: dict[str, None] = {}
    with open_stream(path) as stream:
        if format in DELIMITERS:
            names = dict.fromkeys(next(_csv_rows(stream, format, limits), []))
        else:
            for record in itertools.islice(_json(stream, format, 0, None, limits), most):
                try:
                    value = json.loads((record or b"").removeprefix(_BOM))
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, str):
                    return []
                names |= dict.fromkeys(value if isinstance(value, dict) else ())
    return [] if limits.column in names else list(names)


# ---------------------------------------------------------------------- JSON


def _json(stream: Any, format: str, start: int, stop: int | None, limits: Limits) -> Iterator[bytes | None]:
    if format == "json":
        return read_array(stream, limits.longest_record)
    lines = read_lines(stream, start, stop, limits.longest_record)
    return (line for line in lines if line is None or line.strip())


def _json_document(record: bytes | None, limits: Limits) -> Record:
    if record is None:
        return None, "too_long"
    try:
        value = json.loads(record.removeprefix(_BOM))
    except UnicodeDecodeError:
        return None, "invalid_utf8"
    except (ValueError, RecursionError):
        return None, "binary" if b"\0" in record else "invalid_json"
    if not isinstance(value, str):
        if not isinstance(value, dict) or limits.column not in value:
            return None, "missing_column"
        value = value[limits.column]
    return check_text(value, limits.max_document_bytes)


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
    depth, in_string, closed, several = 0, False, False, False
    element, too_long, held_back = b"", False, _BOM
    # read1: read would lose the part of the last chunk that it had read from a truncated .gz.
    while chunk := stream.read1(_CHUNK):
        chunk = chunk.removeprefix(_BOM) if held_back == _BOM else held_back + chunk
        # What an escape at the end escapes comes with the next chunk.
        odd = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
        chunk, held_back = chunk[: len(chunk) - odd], b"\\" * odd
        begin = 0
        for match in _SIGNS.finditer(chunk):
            sign, at = match[0], match.start()
            if depth == 0 and (closed or sign != b"[" or chunk[:at].strip(_SPACE)):
                raise ValueError("something after the array" if closed else "not a JSON array")
            if sign == b'"':
                in_string = not in_string
            elif in_string or len(sign) == 2:
                continue
            elif sign in b"[{":
                depth += 1
                begin = at + 1 if depth == 1 else begin
            elif sign != b"," or depth == 1:
                depth -= sign != b","
                if sign == b"," or depth == 0:
                    element, several = element + chunk[begin:at], several or sign == b","
                    if several or element.strip() or too_long:
                        yield None if too_long or len(element) > longest else element
                    element, too_long, begin, closed = b"", False, at + 1, depth == 0
        if depth:
            element += chunk[begin:]
            if len(element) > longest:
                element, too_long = b"", True
        elif chunk[begin:].strip(_SPACE):
            raise ValueError("something after the array" if closed else "not a JSON array")
    if not closed:
        raise ValueError("the array does not end")


# ---------------------------------------------------------------------- lines


def read_lines(stream: Any, start: int, stop: int | None, longest: int) -> Iterator[bytes | None]:
    """Yield lines that begin at bytes ``start … stop - 1``, without line ends; None for one beyond *longest*.

    So each line of a file is read once, wherever the file is cut into pieces.
    """
    # A line begins at *start* if the byte before ends one. From there, the first "line" is the end of
    # another.
    position, in_line = max(0, start - 1), start > 0
    if position:
        stream.seek(position)
    while (stop is None or position < stop) and (part := stream.readline(longest + 1)):
        position += len(part)
        ends = part.endswith(b"\n")
        if not in_line:
            fits = ends or len(part) <= longest
            yield part.removesuffix(b"\n").removesuffix(b"\r") if fits else None
        in_line = not ends


def _field(row: list[str], header: list[str], limits: Limits) -> Record:
    """The text of a row of CSV."""
    if len(row) > len(header):
        return None, "extra_fields"  # a comma in a text without quotes: the rest of it would be lost
    column = header.index(limits.column)
    return (
        check_text(row[column], limits.max_document_bytes) if len(row) > column else (None, "missing_column")
    )


def _csv_rows(stream: Any, format: str, limits: Limits) -> Iterator[list[str]]:
    """The rows of a CSV file (strict RFC 4180), the header first; bytes that are not UTF-8 are kept as
    surrogates.

    Raises:
        ValueError: quotes that do not fit, or a line or field beyond the longest record's characters.
    """
    longest = limits.longest_record
    csv.field_size_limit(longest)
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")

    def lines() -> Iterator[str]:
        while line := text.readline(longest + 1):
            if len(line) > longest:
                raise ValueError(f"a line of more than {longest} characters")
            yield line

    rows = csv.reader(lines(), delimiter=DELIMITERS[format], strict=True)
    try:
        yield from rows
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error
