"""Reads documents from files, piece by piece: plain text, lines, JSON, CSV, Parquet; compressed or not.

A document that cannot be used is returned as ``(None, reason)``. Memory is bounded by the longest usable
document, whatever the file holds.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from model.errors import UserError
from pretrain.data.sources.records import json_layout, read_array, read_rows

FORMATS = ("auto", "text", "lines", "jsonl", "json", "csv", "tsv", "parquet")
MAX_DOCUMENT_BYTES = 10_000_000
COMPRESSED = (".gz", ".zst")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_HEAD = 1 << 16  # bytes of a .json file that show how it is laid out
# A JSON line may hold other fields, and up to six bytes for a character (\u0416 for two bytes of UTF-8).
_JSON_LINE_FACTOR = 4
_WHOLE = ("json", *_DELIMITERS)  # a comma or a line end does not say whether it lies inside a string
_CHUNK = 1 << 20
_ROWS = 128  # Parquet rows decoded at a time
_RECORDS_CHECKED = 100

Record = tuple[str | None, str]
"""(text, "") or (None, reason)."""


@dataclass(frozen=True)
class Limits:
    """What is read from a file; see :class:`pretrain.data.sources.files.FileSource`."""

    column: str = "text"
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    skip_damaged: bool = False

    def identity(self) -> tuple[object, ...]:
        """The settings that decide which documents a file gives."""
        return (self.column, self.max_document_bytes, self.skip_damaged)


def format_of(path: Path, asked: str) -> str:
    """The format of a file, never "auto": *asked*, or if that is "auto" by its ending (``.json``: its beginning too).

    Raises:
        UserError: a ``.json`` file that is neither an array nor JSON Lines.
    """
    if asked != "auto":
        return asked
    name = path.name.lower()
    for end in COMPRESSED:
        name = name.removesuffix(end)
    ending = name.rpartition(".")[2] if "." in name else ""
    if ending in ("jsonl", "ndjson"):
        return "jsonl"
    if ending == "json":
        return _json_format(path)
    if ending in _DELIMITERS:
        return ending
    return "parquet" if path.name.lower().endswith(".parquet") else "text"


def _json_format(path: Path) -> str:
    try:
        with open_stream(path) as stream:
            layout = json_layout(_read_up_to(stream, _HEAD))
    except (OSError, EOFError, zlib.error):
        return "jsonl"  # whose reader finds the damage and reports it
    if layout == "other":
        raise UserError(
            f"text: {str(path)!r} is neither a JSON array nor JSON Lines; valid: [{{…}}, …] or a record {{…}} a line, "
            "or --format jsonl to count lines that are not records, or --format text to take every file as one text"
        )
    return "json" if layout == "array" else "jsonl"


def decode_document(data: bytes, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """``(text, "")`` for usable UTF-8, else ``(None, reason)``."""
    if len(data) > max_bytes:
        return None, "too_long"
    if not data.strip():
        return None, "empty"
    if b"\0" in data:
        return None, "binary"
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError:
        return None, "invalid_utf8"


def read_file(path: Path, limits: Limits) -> Record:
    """Read a file that is one document."""
    try:
        with open_stream(path) as stream:
            return decode_document(
                _read_up_to(stream, limits.max_document_bytes + 1), limits.max_document_bytes
            )
    except FileNotFoundError:
        return None, "unreadable"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return None, "damaged"
    except OSError as error:
        # pyarrow reports damage to a .zst as an OSError without a number.
        return None, "damaged" if error.errno is None else "unreadable"


def _read_up_to(stream: BinaryIO, count: int) -> bytes:
    parts = []
    while count > 0 and (part := stream.read(min(count, 16 * _CHUNK))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[Any]:
    """Open a file to read its decompressed bytes."""
    if path.name.lower().endswith(".gz"):
        with gzip.open(path, "rb") as stream:
            yield stream
    elif path.name.lower().endswith(".zst"):
        import pyarrow

        with path.open("rb") as raw, pyarrow.CompressedInputStream(raw, "zstd") as stream:
            yield stream
    else:
        with path.open("rb") as stream:
            yield stream


def pieces(
    path: Path, format: str, size: int, unit_bytes: int, limits: Limits
) -> Iterator[tuple[int, int | None, int]]:
    """Cut one file: (start, stop, bytes) of each piece; offsets for lines, row groups for Parquet.

    A compressed file, a JSON array and a CSV file are one piece (0, None, size). Raises UserError for a Parquet file
    without the column.
    """
    if format == "parquet":
        yield from _row_groups(path, unit_bytes, limits)
    elif format in _WHOLE or path.name.lower().endswith(COMPRESSED) or size <= unit_bytes:
        yield 0, None, size
    else:
        for start in range(0, size, unit_bytes):
            stop = min(start + unit_bytes, size)
            yield start, stop, stop - start


def _row_groups(path: Path, unit_bytes: int, limits: Limits) -> Iterator[tuple[int, int, int]]:
    with _damage(path, limits) as intact, _parquet(path) as file:
        index = _text_column(path, file, limits.column)
        metadata, start, total = file.metadata, 0, 0
        for group in range(metadata.num_row_groups):
            total += metadata.row_group(group).column(index).total_compressed_size
            if total >= unit_bytes or group == metadata.num_row_groups - 1:
                yield start, group + 1, total
                start, total = group + 1, 0
        if metadata.num_row_groups == 0:
            yield 0, 0, 0
    if not intact:
        yield 0, 0, 0  # read_piece finds the damage again, and counts it


class _FileState:
    """True until the file turns out to be damaged."""

    def __init__(self) -> None:
        self.intact = True

    def __bool__(self) -> bool:
        return self.intact


@contextlib.contextmanager
def _damage(path: Path, limits: Limits) -> Iterator[_FileState]:
    """Turns damage to a file of many documents into a UserError, or records it if it is to be skipped."""
    state = _FileState()
    try:
        yield state
    except UserError:
        raise
    # pyarrow's errors are OSErrors and ValueErrors; RuntimeError is what Parquet pages may raise.
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        if not limits.skip_damaged:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise UserError(
                f"text: {str(path)!r} is truncated or damaged ({reason}); replace it, or give --skip_damaged to "
                "take what can be read (what is tokenized already is kept)"
            ) from error
        state.intact = False


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    # Without pre-buffering a row group is streamed instead of held: FineWeb's have hundreds of megabytes.
    file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK)
    try:
        yield file
    finally:
        file.close()


def _text_column(path: Path, file: Any, column: str) -> int:
    """Index of the column among the file's leaves; UserError if it is missing or holds no text."""
    import pyarrow.types as types

    schema = file.schema_arrow
    if column not in schema.names:
        raise UserError(
            f"column: {str(path)!r} has no column {column!r}; valid: --column with one of "
            f"{', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(
            f"column: {column!r} of {str(path)!r} holds {kind}, not text; valid: a column of strings"
        )
    return [file.schema.column(index).path for index in range(len(file.schema))].index(column)


def read_piece(path: Path, format: str, start: int, stop: int | None, limits: Limits) -> Iterator[Record]:
    """Yield the documents of one piece of a file, in order."""
    with _damage(path, limits) as intact:
        if format == "parquet":
            yield from _read_parquet(path, start, stop, limits)
        elif format in _DELIMITERS:
            yield from _read_csv(path, format, limits)
        elif format == "json" and path.stat().st_size:
            with open_stream(path) as stream:
                for element in read_array(stream, _longest_record(limits)):
                    yield _json_document(element, limits)
        elif format in ("json", "jsonl"):
            for line in read_lines(path, start, stop, _longest_record(limits)):
                if line is None or line.strip():
                    yield _json_document(line, limits)
        else:
            for line in read_lines(path, start, stop, limits.max_document_bytes):
                yield (None, "too_long") if line is None else decode_document(line, limits.max_document_bytes)
        if start == 0 and format != "parquet" and not path.stat().st_size:
            yield None, "empty"
    if not intact:
        yield None, "damaged_file"


def _longest_record(limits: Limits) -> int:
    return _JSON_LINE_FACTOR * limits.max_document_bytes


def _read_csv(path: Path, format: str, limits: Limits) -> Iterator[Record]:
    with open_stream(path) as stream:
        rows = read_rows(stream, _DELIMITERS[format], _longest_record(limits))
        header = next(rows, None)
        if header is None:
            return
        if limits.column not in header:
            raise _no_column(path, limits, header)
        column = header.index(limits.column)
        for row in rows:
            if len(row) > len(header):
                yield None, "extra_fields"  # a comma in a text without quotes: the rest of it would be lost
            elif row:
                yield (
                    check_text(row[column], limits.max_document_bytes)
                    if column < len(row)
                    else (
                        None,
                        "missing_column",
                    )
                )


def _no_column(path: Path, limits: Limits, names: Iterable[str]) -> UserError:
    shown = ", ".join(" ".join(name.split())[:60] for name in itertools.islice(names, 20))
    return UserError(
        f"column: the records of {str(path)!r} have no {limits.column!r}; valid: --column with one of {shown}, "
        "or --format text to take every file as one text"
    )


def _json_document(line: bytes | None, limits: Limits) -> Record:
    if line is None:
        return None, "too_long"
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError:
        return None, "invalid_utf8"
    except (ValueError, RecursionError):
        return None, "binary" if b"\0" in line else "invalid_json"
    if isinstance(record, str):
        return check_text(record, limits.max_document_bytes)
    if not isinstance(record, dict) or limits.column not in record:
        return None, "missing_column"
    return check_text(record[limits.column], limits.max_document_bytes)


def check_text(text: object, max_bytes: int) -> Record:
    """``(text, "")`` for a usable decoded value, else ``(None, reason)``."""
    if text is None:
        return None, "empty"
    if not isinstance(text, str):
        return None, "no_text"
    if not text or text.isspace():
        return None, "empty"
    if "\0" in text:
        return None, "binary"
    try:
        return (None, "too_long") if len(text.encode()) > max_bytes else (text, "")
    except UnicodeEncodeError:  # half of a surrogate pair
        return None, "invalid_utf8"


def read_lines(path: Path, start: int, stop: int | None, longest: int) -> Iterator[bytes | None]:
    """Yield lines that begin at bytes ``start … stop - 1``, without line ends; None for one beyond *longest*.

    So each line of a file is read once, wherever the file is cut into pieces.
    """
    with open_stream(path) as stream:
        # A line begins at *start* if the byte before ends one. From there, the first "line" is the end of another.
        position = max(0, start - 1)
        if position:
            stream.seek(position)
        in_piece = start == 0
        line_start, dropped_bytes = b"", 0  # the beginning of the current line; bytes of it not kept
        # read1: read would lose the part of the last chunk that it had read from a truncated .gz.
        while chunk := stream.read1(_CHUNK):
            ends_at = -1
            while (newline := chunk.find(b"\n", ends_at + 1)) >= 0:
                piece = chunk[ends_at + 1 : newline]
                length = dropped_bytes + len(line_start) + len(piece)
                if in_piece:
                    yield (
                        None
                        if dropped_bytes or length > longest
                        else (line_start + piece).removesuffix(b"\r")
                    )
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
            yield None if dropped_bytes or len(line_start) > longest else line_start.removesuffix(b"\r")


def _read_parquet(path: Path, start: int, stop: int | None, limits: Limits) -> Iterator[Record]:
    import pyarrow

    with _parquet(path) as file:
        _text_column(path, file, limits.column)
        if file.metadata.num_rows == 0:
            yield None, "empty"
            return
        groups = list(range(start, file.metadata.num_row_groups if stop is None else stop))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[limits.column], use_threads=False):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # As bytes: nothing has checked that a file's strings are UTF-8.
            for data in column.cast(pyarrow.large_binary()).to_pylist():
                yield (None, "empty") if data is None else decode_document(data, limits.max_document_bytes)


def check_column(path: Path, format: str, limits: Limits) -> None:
    """Raise UserError if none of the first records of a file has the column."""
    if format in _DELIMITERS:
        with _damage(path, Limits(skip_damaged=True)):
            next(_read_csv(path, format, limits), None)
        return
    keys: dict[str, None] = {}
    with _damage(path, Limits(skip_damaged=True)), contextlib.ExitStack() as opened:
        records: Iterator[bytes | None]
        if format == "json":
            records = read_array(opened.enter_context(open_stream(path)), _longest_record(limits))
        else:
            records = read_lines(path, 0, None, _longest_record(limits))
        checked = 0
        for line in records:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads((line or b"").removeprefix(b"\xef\xbb\xbf"))
                if isinstance(record, str) or (isinstance(record, dict) and limits.column in record):
                    return
                if isinstance(record, dict):
                    keys.update(dict.fromkeys(record))
                    checked += 1
            if checked >= _RECORDS_CHECKED:
                break
    if keys:
        raise _no_column(path, limits, keys)
