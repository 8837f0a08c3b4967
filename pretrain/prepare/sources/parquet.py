"""Reads documents from Parquet files, a part of a row group in memory at a time.

(``datasets`` holds whole row groups, and those of FineWeb have hundreds of megabytes, in every process.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.sources.reading import Record, check_text
from pretrain.prepare.sources.readers import Limits

_BUFFER = 1 << 20
ROWS = 128  # decoded at a time


@contextlib.contextmanager
def _opened(path: Path, column: str) -> Iterator[tuple[Any, int]]:
    """The file, and the index of the column among its leaves; UserError if it is missing or holds no text."""
    import pyarrow.parquet
    from pyarrow import types

    # Without pre-buffering a row group is streamed instead of held.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise UserError(
                f"column: {str(path)!r} has no column {column!r}; valid: --column with one of "
                f"{', '.join(schema.names)}"
            )
        kind = schema.field(column).type
        text = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
            raise UserError(
                f"column: {column!r} of {str(path)!r} holds {kind}, not text; valid: a column of strings"
            )
        leaves = [file.schema.column(index).path for index in range(len(file.schema))]
        yield file, leaves.index(column)


def row_groups(path: Path, column: str, piece_bytes: int) -> list[tuple[int, int, int]]:
    """Cut a file: first row group, end, and bytes of each piece of about *piece_bytes* of the column.

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


def read_row_groups(
    path: Path, format: str, start: int, stop: int | None, limits: Limits
) -> Iterator[Record]:
    """Yield the documents of row groups ``start … stop - 1``, in order. Raises OSError or ValueError for
    damage."""
    with _opened(path, limits.column) as (file, _):
        if not file.metadata.num_rows:
            yield None, "empty"
        groups, columns = range(start, stop or 0), [limits.column]
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False):
            for value in plain_values(batch.column(0)):
                yield check_text(value, limits.max_document_bytes)


def plain_values(values: Any) -> list[Any]:
    """Python values of an Arrow array; strings as bytes, since nothing has checked that they are UTF-8."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if (
        types.is_string(values.type)
        or types.is_large_string(values.type)
        or types.is_string_view(values.type)
    ):
        values = values.cast(pyarrow.large_binary())
    return values.to_pylist()
