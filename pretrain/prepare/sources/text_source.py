"""The interface of text sources: documents in a fixed order, cut into pieces that processes read
independently.

What makes a corpus knows nothing else about where text comes from.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError

# Bytes of a file that are hashed: all up to the first, else so many at each end.
_WHOLE, _END = 16 << 20, 1 << 20


@dataclass(frozen=True)
class Document:
    """One document: its text and a path or identifier that says where it came from."""

    path_or_id: str
    text: str

    def digest(self) -> bytes:
        """SHA-256 of the UTF-8 text (32 bytes): equal documents have equal digests, wherever they lie."""
        return hashlib.sha256(self.text.encode("utf-8")).digest()


@dataclass(frozen=True)
class Unit:
    """A piece of a source that one process reads from beginning to end.

    How a source is cut depends on the source alone, so that neither the number of processes nor a restart
    changes anything.
    """

    key: str
    """Identifies the piece and its content: changes when a file changes."""
    size: int
    """Bytes of the piece on disk, for estimating the time left; 0 if unknown."""
    place: tuple[Any, ...]
    """What the source needs to find it (picklable)."""


class TextSource(ABC):
    """A re-iterable collection of documents in a fixed order. Sources are pickled to worker processes."""

    name: str
    """Short name, part of messages."""
    skipped: Counter[str]
    """Reason -> number of documents left out; every pass over :meth:`documents` counts from zero."""

    @abstractmethod
    def units(self) -> list[Unit]:
        """The pieces of the source, in the order of their documents. Raises UserError for a bad source."""

    @abstractmethod
    def read(self, unit: Unit) -> Iterator[Document | str]:
        """Documents of one piece, in order; a string is the reason why a document is left out.

        Raises UserError for damage that is not confined to a document.
        """

    def check(self) -> None:
        """Raise UserError for problems of the source as a whole that show without reading it."""
        return

    def documents(self) -> Iterator[Document]:
        """Yield the usable documents, without those of a validation text of the source's own; the same ones
        in the same order on every call. UserError if none."""
        self.skipped = Counter()
        usable = False
        for unit in self.units():
            for record in self.read(unit):
                if isinstance(record, str):
                    self.skipped[record] += 1
                else:
                    usable = True
                    yield record
        if not usable:
            raise UserError(describe_no_documents(self.name, self.skipped))

    def held_out_units(self) -> int | None:
        """Number of units, the first ones, that are a validation text of the source's own; None if it has
        none."""
        return None

    def settings(self) -> str:
        """The settings that, besides the unit, decide which documents :meth:`read` yields."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal hash of everything that determines the documents; cheap next to tokenizing them."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The entry of ``meta.json`` about the source (JSON values; nothing that depends on the machine)."""


def file_sample(path: Path) -> bytes:
    """The bytes that stand for a file's content: all of them, or the first and last MiB of a file beyond 16
    MiB, so that large sources are not read twice. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size <= _WHOLE:
            return stream.read(_WHOLE)
        head = stream.read(_END)
        stream.seek(-_END, os.SEEK_END)
        return head + stream.read()


def describe_no_documents(name: str, skipped: Mapping[str, int]) -> str:
    """The message for the source *name* in which no document is usable."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    needed = "UTF-8 text"
    if "too_long" in skipped:
        needed += "; raise --max_document_bytes, or take each line as a document with --format lines"
    return f"corpus: no usable document in {name!r} ({reasons or 'nothing there'}); needed: {needed}"
