"""Reads text: compressed files, and what makes a document usable.

A document that cannot be used is returned as ``(None, reason)``. A file that is sound, but beyond what is
read here, is never taken for a damaged one: see make_limit_error.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import errno
import gzip
import io
import json
import lzma
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from model.errors import UserError
from pretrain.utils.files import OTHER_KINDS

MAX_DOCUMENT_BYTES = 10_000_000
BOM = codecs.BOM_UTF8
"""A byte order mark, which some programs write at the beginning of a file. It is no part of the text."""
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = (*_OPENERS, ".zst")
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RuntimeError)
"""What readers raise for damaged files. pyarrow's errors are OSErrors, ValueErrors and RuntimeErrors."""
_CHUNK = 16 << 20
# The UTF-32 mark of little-endian files begins with that of UTF-16.
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_LONGEST_INTEGER = 4000  # digits; int() rejects more than 4300
_LIMITS = {
    "Frame requires too much memory": (
        "was compressed by zstd with a window of more than the 128 MiB that are read",
        "compress it again without --long: zstd -dc --long=31 FILE | zstd -o NEW.zst",
    ),
    "Dictionary mismatch": (
        "was compressed by zstd with a dictionary, which is not read",
        "compress it again without: zstd -dc -D DICTIONARY FILE | zstd -o NEW.zst",
    ),
    "nsupported": ("was compressed in a way that is not read ({})", "decompress it first"),
    "encrypted": ("is encrypted, which is not read", "give the file without encryption"),
}
"""What in a library's message says that a file is sound, but not read: what is reported, and the remedy."""

Record = tuple[str | None, str]
"""(text, "") or (None, reason)."""


def strip_compression(name: str) -> str:
    """A file's name in lower case, without the ending of a compression that is read."""
    name = name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


def make_limit_error(path: Path, error: BaseException, what: str = "text") -> UserError | None:
    """The error to raise if a reader's *error* shows a limit of the reader, or trouble of the machine, and no
    damage to the file; else None.

    Args:
        what: how the message begins.
    """
    # Libraries report damage by an OSError without a number.
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(f"{what}: {str(path)!r} cannot be read ({error.strerror}); make it readable")
    reason = " ".join(str(error).split())[:120]
    for words, (problem, remedy) in _LIMITS.items():
        if words in reason:
            return UserError(f"{what}: {str(path)!r} {problem.format(reason)}; {remedy}")
    if isinstance(error, RecursionError):
        return UserError(
            f"{what}: {str(path)!r} is nested deeper than Python reads (at least roughly 900 levels); write "
            "it as JSON Lines, of which only such records are left out"
        )
    if isinstance(error, NotImplementedError):
        return UserError(
            f"{what}: {str(path)!r} needs what the library that reads it does not have ({reason}); write it "
            "with another compression or encoding"
        )
    if isinstance(error, MemoryError):
        return UserError(
            f"{what}: {str(path)!r} does not fit into this machine's memory; give fewer --processes, or cut "
            "it into smaller files (JSON Lines are read line by line)"
        )
    return None


def check_beginning(path: Path, records: bool = True) -> None:
    """Raise UserError for a file whose beginning shows that it is sound, but not read.

    Args:
        records: whether it holds many documents. One that is a document is left out if it is no UTF-8.
    """
    head = b""
    try:
        with open_stream(path) as stream:
            head = stream.read(4)
    except DAMAGE as error:
        unreadable = isinstance(error, OSError) and error.errno is not None  # reported when it is read
        if not unreadable and (limit := make_limit_error(path, error)):
            raise limit from error
    if records and head.startswith(_OTHER_MARKS):
        raise UserError(
            f"text: {str(path)!r} is UTF-16 or UTF-32 text; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
        )


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text, as json.loads reads it; of a key that occurs twice the last one counts.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return from_json(content, cache_strings="none")  # json.loads would hold all of it as a string, too
    except ValueError:
        return json.loads(content, parse_int=_integer)  # which admits more, such as half of a surrogate pair


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < _LONGEST_INTEGER else float(digits)


def check_text(text: object, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """``(text, "")`` for a usable value, decoded or UTF-8, else ``(None, reason)``."""
    if isinstance(text, bytes):
        if len(text) > max_bytes:
            return None, "too_long"
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError:
            binary = b"\0" in text and not text.startswith(_OTHER_MARKS)
            return None, "binary" if binary else "invalid_utf8"
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
        ending = path.suffix.lower()
        if ending in _OPENERS:
            with _OPENERS[ending](file, "rb") as stream:
                yield stream
        elif ending == ".zst":
            import pyarrow

            raw: Any = pyarrow.CompressedInputStream(file, "zstd")
            with io.BufferedReader(raw) as buffered:
                yield buffered
        else:
            yield file


def read_up_to(stream: BinaryIO, count: int) -> bytes:
    """The next *count* bytes, or fewer at the end; memory grows with the bytes read, not with *count*."""
    parts = []
    while count > 0 and (part := stream.read(min(count, _CHUNK))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_file(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Record:
    """Read a file that is one document, without its byte order mark.

    Raises:
        UserError: the file is sound, but compressed in a way that is not read.
    """
    try:
        with open_stream(path) as stream:
            content = read_up_to(stream, len(BOM) + max_bytes + 1)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            return None, "unreadable"
        if limit := make_limit_error(path, error):
            raise limit from error
        return None, "damaged"
    return check_text(content.removeprefix(BOM), max_bytes)
