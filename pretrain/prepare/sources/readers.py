"""Reads documents from files of many: lines, JSON Lines, JSON arrays, CSV, Parquet; compressed or not.

Each reader turns every record of a file into a document or the reason why it is none. Memory is bounded by
the longest usable document, except for JSON arrays, which are read whole. (``datasets`` gives up a whole JSON
or CSV file for one bad record, makes text of numbers, changes line ends, does not cut such files into pieces,
and holds whole row groups of Parquet files, and those of FineWeb have hundreds of megabytes, in every
process.)
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from model.errors import UserError
from pretrain.data.sources.reading import Record, check_text, open_stream

DELIMITERS = {"csv": ",", "tsv": "\t"}
ROWS = 128  # of a Parquet file, decoded at a time
_BUFFER = 1 << 20
# A record may hold other fields, and up to six bytes for a character (\u0416 for two bytes of UTF-8).
_RECORD_FACTOR = 4


def read_piece(
    path: Path, format: str, start: int, stop: int | None, column: str, longest: int
) -> Iterator[Record]:
    """Yield the documents of one piece of a file, in order.

    Args:
        start, stop: byte offsets of lines; numbers of row groups for Parquet.
        column: the field of JSON objects, or column, that holds the text.
        longest: bytes of the longest usable document.

    Raises:
        OSError, EOFError, zlib.error, ValueError, RuntimeError: the file is damaged from here on.
        UserError: the file lacks the column, which it would have to name.
    """
    if format == "parquet":
        yield from _row_groups(path, range(start, stop or 0), column, longest)
        return
    if not path.stat().st_size:
        yield None, "empty"
        return
    with open_stream(path) as stream:
        if format in DELIMITERS:
            yield from _csv(stream, path, format, column, longest)
        elif format == "lines":
            for line in read_lines(stream, start, stop, longest):
                yield (None, "too_long") if line is None else check_text(line, longest)
        elif format == "jsonl":
            for line in read_lines(stream, start, stop, _RECORD_FACTOR * longest):
                if line is None or line.strip():
                    record = _json_line(line, column, longest)
                    del line  # it may be long, and is not needed while its document is tokenized
                    yield record
        else:
            values = _parsed(stream.read())
            if not isinstance(values, list):
                raise ValueError("not a JSON array")
            yield from (_json_text(value, column, longest) for value in values)


def _json_line(line: bytes | None, column: str, longest: int) -> Record:
    if line is None:
        return None, "too_long"
    try:
        value = _parsed(line)
    except UnicodeDecodeError:
        return None, "invalid_utf8"
    except (ValueError, RecursionError):
        return None, "binary" if b"\0" in line else "invalid_json"
    return _json_text(value, column, longest)


def _parsed(content: bytes) -> Any:
    """The value of a JSON text, as json.loads reads it; of a key that occurs twice the last one counts."""
    try:
        return from_json(content, cache_strings="none")  # json.loads would hold all of it as a string, too
    except ValueError:
        return json.loads(content)  # which admits more, such as half of a surrogate pair


def _json_text(value: Any, column: str, longest: int) -> Record:
    if not isinstance(value, str):
        if not isinstance(value, dict) or column not in value:
            return None, "missing_column"
        value = value[column]
    return check_text(value, longest)


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
        begun, in_line = in_line, not ends
        if not begun:
            fits = ends or len(part) <= longest
            line = [part.removesuffix(b"\n").removesuffix(b"\r") if fits else None]
            del part  # only who gets the line holds it: it may be long
            yield line.pop()


def _csv(stream: Any, path: Path, format: str, column: str, longest: int) -> Iterator[Record]:
    """The texts of a CSV file (strict RFC 4180).

    Characters stand for bytes until a text is checked. What divides lines and fields is ASCII, and a single
    character beyond Latin-1 would make a string as wide as four bytes a character.

    Raises:
        ValueError: quotes that do not fit, or a line or field beyond the longest record's bytes.
    """
    longest_record = _RECORD_FACTOR * longest
    csv.field_size_limit(longest_record)
    text = io.TextIOWrapper(stream, "latin-1", newline="")

    def next_line() -> str:
        if len(line := text.readline(longest_record + 1)) > longest_record:
            raise ValueError(f"a line of more than {longest_record} bytes")
        return line

    def reader() -> Any:
        return csv.reader(iter(next_line, ""), delimiter=DELIMITERS[format], strict=True)

    rows, number = reader(), 0
    try:
        names = [name.encode("latin-1").decode("utf-8", "surrogateescape") for name in next(rows, [])]
        header = [name.removeprefix("\ufeff") for name in names[:1]] + names[1:]
        if column not in header:
            raise _no_column(path, column, header)
        if (times := header.count(column)) > 1:
            raise UserError(
                f"column: {str(path)!r} has {times} columns {column!r}; valid: a name that one column has"
            )
        index = header.index(column)
        while (row := next(rows, None)) is not None:
            if sum(map(len, row)) > _BUFFER:  # a reader keeps the memory that its longest field took
                number += rows.line_num
                rows = reader()
            if not row:
                continue
            if len(row) > len(header):
                record: Record = None, "extra_fields"  # a comma in a text without quotes: it would be cut
            elif len(row) <= index:
                record = None, "missing_column"
            else:
                record = check_text(row[index].encode("latin-1"), longest)
            del row
            yield record
    except csv.Error as error:
        raise ValueError(f"line {number + rows.line_num}: {error}") from error


def _no_column(path: Path, column: str, names: list[str]) -> UserError:
    shown = ", ".join(" ".join(name.split())[:60] for name in names[:20])
    return UserError(f"column: {str(path)!r} has no column {column!r}; valid: --column with one of {shown}")


# ---------------------------------------------------------------------- Parquet


@contextlib.contextmanager
def _opened(path: Path, column: str) -> Iterator[tuple[Any, int]]:
    """The file, and the index of the column among its leaves; UserError if it is missing or holds no text."""
    import pyarrow.parquet
    from pyarrow import types

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # which gives memory back
    # Without pre-buffering a row group is streamed instead of held.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise _no_column(path, column, schema.names)
        kind = schema.field(column).type
        text = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
            raise UserError(
                f"column: {column!r} of {str(path)!r} holds {kind}, not text; valid: a column of strings"
            )
        leaves = [file.schema.column(index).path for index in range(len(file.schema))]
        yield file, leaves.index(column)


def cut_row_groups(path: Path, column: str, piece_bytes: int) -> list[tuple[int, int, int]]:
    """Cut a Parquet file: first row group, end, and bytes of each piece of about *piece_bytes* of the column.

    Raises:
        UserError: there is no such column of text.
    """
    pieces, start, size = [], 0, 0
    with _opened(path, column) as (file, leaf):
        groups = file.metadata.num_row_groups
        for group in range(groups):
            size += file.metadata.row_group(group).column(leaf).total_compressed_size
            if size >= piece_bytes or group == groups - 1:
                pieces.append((start, group + 1, size))
                start, size = group + 1, 0
    return pieces or [(0, 0, 0)]


def _row_groups(path: Path, groups: range, column: str, longest: int) -> Iterator[Record]:
    with _opened(path, column) as (file, _):
        if not file.metadata.num_rows:
            yield None, "empty"
        for group in groups:
            left = file.metadata.row_group(group).num_rows
            batches = file.iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False)
            # What is decoded is let go before its documents are tokenized: it may be long.
            while values := next((plain_values(batch.column(0)) for batch in batches), None):
                left -= len(values)
                if not left:
                    batches.close()  # which holds the page of the last rows
                while values:
                    yield check_text(values.pop(0), longest)


def plain_values(values: Any) -> list[Any]:
    """Python values of an Arrow array; strings as bytes, since nothing has checked that they are UTF-8."""
    import pyarrow

    return values.cast(pyarrow.large_binary()).to_pylist()
