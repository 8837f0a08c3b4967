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
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.prepare.sources.streams import (
    BOM,
    DAMAGE,
    Record,
    check_text,
    open_stream,
    parse_json,
    strip_compression,
)

PLAIN_TSV = "plain_tsv"
"""TSV in which quotes mean nothing."""
DELIMITERS = {"csv": ",", "tsv": "\t", PLAIN_TSV: "\t"}
QUOTES_IN_TSV = "--format tsv takes quotes as text, --format csv as the ends of a field"
ROWS = 128  # of a Parquet file, decoded at a time
_BUFFER = 1 << 20
SEVERAL = "; where files differ, such as --column text,abstract: the first that each has"
"""How a text column is named that has several names, for messages."""
# Of Parquet's metadata; pyarrow's own limits reject files with many columns or long notes.
_MOST_METADATA = (1 << 31) - 1
# A record may hold other fields, and up to six bytes for a character (\u0416 for two bytes of UTF-8).
_RECORD_FACTOR = 4


def read_piece(
    path: Path, format: str, start: int, stop: int | None, column: str, longest: int
) -> Iterator[Record]:
    """Yield the documents of one piece of a file, in order.

    Args:
        start, stop: byte offsets of lines; numbers of row groups for Parquet.
        column: the field of JSON objects, or column, that holds the text; see choose_column.
        longest: bytes of the longest usable document.

    Raises:
        OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RuntimeError: the file is damaged from here
            on, or beyond what is read (see make_limit_error).
        UserError: the file lacks the column, which it would have to name, or a record of a CSV file is too
            long.
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
            values = parse_json(stream.read().removeprefix(BOM))
            if not isinstance(values, list):
                raise ValueError("not a JSON array")
            yield from (_json_text(value, column, longest) for value in values)


def _json_line(line: bytes | None, column: str, longest: int) -> Record:
    if line is None:
        return None, "too_long"
    try:
        value = parse_json(line)
    except UnicodeDecodeError:
        return None, "invalid_utf8"
    except RecursionError:
        return None, "too_deep"
    except ValueError:
        return None, "binary" if b"\0" in line else "invalid_json"
    return _json_text(value, column, longest)


def _json_text(value: Any, column: str, longest: int) -> Record:
    if not isinstance(value, str):
        name = choose_column(value, column) if isinstance(value, dict) else None
        if name is None:
            return None, "missing_column"
        value = value[name]
    return check_text(value, longest)


def choose_column(names: Collection[str], asked: str) -> str | None:
    """The column of *names* that is asked for: of several, parted by commas, the first that is there."""
    return next((name for name in (asked, *asked.split(",")) if name in names), None)


def field_names(path: Path, format: str) -> list[str]:
    """The fields of a JSON file's first object; empty where there is none, or a file is damaged."""
    with contextlib.suppress(*DAMAGE), open_stream(path) as stream:
        content = (stream.readline() if format == "jsonl" else stream.read()).removeprefix(BOM)
        value = parse_json(content)
        first = value[0] if isinstance(value, list) else value
        return list(first) if isinstance(first, dict) else []
    return []


def read_lines(stream: Any, start: int, stop: int | None, longest: int) -> Iterator[bytes | None]:
    """Yield lines that begin at bytes ``start … stop - 1``, without line ends; None for one beyond *longest*.
    A byte order mark at the beginning is left out.

    So each line of a file is read once, wherever the file is cut into pieces.
    """
    # A line begins at *start* if the byte before ends one. From there, the first "line" is the end of
    # another.
    position, in_line = max(0, start - 1), start > 0
    if position:
        stream.seek(position)
    while stop is None or position < stop:
        mark = 0 if position else len(BOM)
        if not (part := stream.readline(mark + longest + 1)):
            return
        position += len(part)
        if mark:
            part = part.removeprefix(BOM)
        ends = part.endswith(b"\n")
        begun, in_line = in_line, not ends
        if not begun:
            fits = len(part) - ends <= longest
            line = [part.removesuffix(b"\n").removesuffix(b"\r") if fits else None]
            del part  # only who gets the line holds it: it may be long
            yield line.pop()


def _csv(stream: Any, path: Path, format: str, column: str, longest: int) -> Iterator[Record]:
    """The texts of a CSV file (strict RFC 4180), whose fields are parted by tabs if its name says TSV.

    Characters stand for bytes until a text is checked. What divides lines and fields is ASCII, and a single
    character beyond Latin-1 would make a string as wide as four bytes a character.

    Raises:
        ValueError: quotes that do not fit.
        UserError: no such column, or more than one; a record that is too long, which may be a quote that
            nothing closes; in TSV, quotes that may enclose a field or several records.
    """
    most = _RECORD_FACTOR * longest
    csv.field_size_limit(most)
    text = io.TextIOWrapper(stream, "latin-1", newline="")
    first_line = [text.readline(most + 1).removeprefix(BOM.decode("latin-1"))]
    rows: Any = None
    number = 0

    def too_long() -> UserError:
        return UserError(
            f"text: line {number + rows.line_num} of {str(path)!r} has a record of more than {most:,} bytes, "
            f"{_RECORD_FACTOR} times --max_document_bytes; raise it, or close the quote that is open there"
        )

    def next_line() -> str:
        line = first_line.pop() if first_line else text.readline(most + 1)
        if len(line) > most:
            raise too_long()
        return line

    def reader() -> Any:
        rule: Any = csv.QUOTE_NONE if format == PLAIN_TSV else csv.QUOTE_MINIMAL
        return csv.reader(iter(next_line, ""), delimiter=delimiter, quoting=rule, strict=True)

    delimiter = DELIMITERS["tsv" if strip_compression(path.name).endswith(".tsv") else format]
    rows = reader()
    try:
        header = [name.encode("latin-1").decode("utf-8", "surrogateescape") for name in next(rows, [])]
        index = header.index(_find_column(path, column, header))
        while (row := next(rows, None)) is not None:
            if sum(map(len, row)) > _BUFFER:  # a reader keeps the memory that its longest field took
                number += rows.line_num
                rows = reader()
            if not row:
                continue
            if format == "tsv" and any("\t" in field and {"\n", "\r"} & {*field} for field in row):
                raise UserError(
                    f"text: line {number + rows.line_num} of {str(path)!r} ends a field in quotes with line "
                    f"ends and tabs; {QUOTES_IN_TSV}"
                )
            if len(row) > len(header):
                record: Record = None, "extra_fields"  # a comma in a text without quotes: it would be cut
            elif len(row) <= index:
                record = None, "missing_column"
            else:
                record = check_text(row[index].encode("latin-1"), longest)
            del row
            yield record
    except csv.Error as error:
        if "field limit" in str(error):
            raise too_long() from None
        if format == "tsv":
            where = f"line {number + rows.line_num} of {str(path)!r}"
            raise UserError(f"text: {where}: {error}; {QUOTES_IN_TSV}") from error
        valid = "quotes inside a field in quotes must be doubled"
        raise ValueError(f"line {number + rows.line_num}: {error}; {valid}") from error


def _find_column(path: Path, column: str, names: list[str]) -> str:
    """Which of a file's columns choose_column takes; UserError if it is missing or there are several."""
    name = choose_column(names, column)
    if name is None:
        shown = ", ".join(" ".join(each.split())[:60] for each in names[:20])
        raise UserError(
            f"column: {str(path)!r} has no column {column!r}; valid: --column with one of {shown}{SEVERAL}"
        )
    if (times := names.count(name)) > 1:
        raise UserError(
            f"column: {str(path)!r} has {times} columns {name!r}; valid: a name that one column has"
        )
    return name


# ---------------------------------------------------------------------- Parquet

# Some writers do not say that bytes are text. A column of nulls has no type.
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")


@contextlib.contextmanager
def _open_parquet(path: Path, column: str) -> Iterator[tuple[Any, str, int]]:
    """The file, the column's name, and its index among the leaves; UserError if it is missing or holds no
    text."""
    import pyarrow.parquet
    from pyarrow import types

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # which gives memory back
    # Without pre-buffering a row group is streamed instead of held.
    limits = {f"thrift_{what}_size_limit": _MOST_METADATA for what in ("string", "container")}
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER, **limits) as file:
        schema = file.schema_arrow
        name = _find_column(path, column, schema.names)
        kind = schema.field(name).type
        text = kind.value_type if types.is_dictionary(kind) else kind
        if not any(is_text(text) for is_text in (getattr(types, f"is_{each}") for each in _TEXT_TYPES)):
            raise UserError(
                f"column: {name!r} of {str(path)!r} holds {kind}, not text; valid: a column of strings"
            )
        leaves = [file.schema.column(index).path for index in range(len(file.schema))]
        yield file, name, leaves.index(name)


def cut_row_groups(path: Path, column: str, piece_bytes: int) -> list[tuple[int, int, int]]:
    """Cut a Parquet file: first row group, end, and bytes of each piece of about *piece_bytes* of the column.

    Raises:
        UserError: there is no such column of text.
    """
    pieces, start, size = [], 0, 0
    with _open_parquet(path, column) as (file, _, leaf):
        groups = file.metadata.num_row_groups
        for group in range(groups):
            size += file.metadata.row_group(group).column(leaf).total_compressed_size
            if size >= piece_bytes or group == groups - 1:
                pieces.append((start, group + 1, size))
                start, size = group + 1, 0
    return pieces or [(0, 0, 0)]


def _row_groups(path: Path, groups: range, column: str, longest: int) -> Iterator[Record]:
    with _open_parquet(path, column) as (file, name, _):
        if not file.metadata.num_rows:
            yield None, "empty"
        for group in groups:
            left = file.metadata.row_group(group).num_rows
            batches = file.iter_batches(ROWS, row_groups=[group], columns=[name], use_threads=False)
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
