"""Reads records from files that cannot be cut into pieces: JSON arrays and CSV. One record is in memory at a time."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from typing import Any

_CHUNK = 1 << 20
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"


def json_layout(head: bytes) -> str:
    """The layout of a ``.json`` file that begins with *head*: "array", "lines" (of records), "other" or "empty"."""
    head = head.removeprefix(_BOM).lstrip()
    if not head:
        return "empty"
    if head.startswith(b"["):
        return "array"
    line, newline, _ = head.partition(b"\n")
    if not newline:
        return "lines" if line.startswith(b"{") else "other"  # one record, or one that is longer than *head*
    try:
        return "lines" if isinstance(json.loads(line), dict) else "other"
    except (ValueError, RecursionError):
        return "other"


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


def read_rows(stream: Any, delimiter: str, longest: int) -> Iterator[list[str]]:
    """Yield the rows of a CSV file, the header first; bytes that are not UTF-8 are kept as surrogates.

    Raises:
        ValueError: quotes that do not fit (strict RFC 4180), or a line or field beyond *longest* characters.
    """
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")

    def lines() -> Iterator[str]:
        while line := text.readline(longest + 1):
            if len(line) > longest:
                raise ValueError(f"a line of more than {longest} characters")
            # The csv module of Python 3.11 and later accepts NUL; check_text counts it.
            yield line

    csv.field_size_limit(longest)
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        yield from rows
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num}: {error}") from error
