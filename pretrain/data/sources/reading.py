"""Reads text: compressed files, and what makes a document usable.

A document that cannot be used is returned as ``(None, reason)``.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pretrain.utils.files import OTHER_KINDS

MAX_DOCUMENT_BYTES = 10_000_000
COMPRESSED = (".gz", ".zst")
_CHUNK = 16 << 20

Record = tuple[str | None, str]
"""(text, "") or (None, reason)."""


def check_text(text: object, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """``(text, "")`` for a usable value, decoded or UTF-8, else ``(None, reason)``."""
    if isinstance(text, bytes):
        if len(text) > max_bytes:
            return None, "too_long"
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError:
            return None, "binary" if b"\0" in text else "invalid_utf8"
        if not decoded or decoded.isspace():
            return None, "empty"
        return (None, "binary") if b"\0" in text else (decoded, "")
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


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[Any]:
    """Open a file, or a pipe, to read its decompressed bytes. OSError for other kinds, which may have no
    end."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFIFO):
        raise OSError(errno.EINVAL, OTHER_KINDS.get(kind, "is not a file"), str(path))
    with path.open("rb") as file:
        if path.name.lower().endswith(".gz"):
            with gzip.open(file, "rb") as stream:
                yield stream
        elif path.name.lower().endswith(".zst"):
            import pyarrow

            raw: Any = pyarrow.CompressedInputStream(file, "zstd")
            with io.BufferedReader(raw) as buffered:
                yield buffered
        else:
            yield file


def read_up_to(stream: BinaryIO, count: int) -> bytes:
    """The next *count* bytes, or fewer at the end; memory grows with what there is, not with *count*."""
    parts = []
    while count > 0 and (part := stream.read(min(count, _CHUNK))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_file(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """Read a file that is one document."""
    try:
        with open_stream(path) as stream:
            return check_text(read_up_to(stream, max_bytes + 1), max_bytes)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return None, "damaged"
    except OSError as error:
        # pyarrow reports damage to a .zst as an OSError without a number.
        return None, "damaged" if error.errno is None else "unreadable"
