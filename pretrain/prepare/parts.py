"""Writes and reads the tokenized parts of an unfinished corpus: finished parts survive any kill.

A unit of the source becomes one or more parts. A part is

    KEY-0000.bin     its tokens, back to back
    KEY-0000.docs    a row of DOCUMENT for every document
    KEY-0000.json    its marker, written last: how far into the unit it goes, and what is in it

KEY is a hash of the unit and of everything that decides its tokens. So every run that asks for the same can use a
part, and no other run does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from model.errors import UserError
from pretrain.data.sources.source import Document, TextSource, Unit
from pretrain.data.tokenizer import Tokenizer
from pretrain.utils.files import own_path, put_file, write_atomically
from pretrain.utils.heap import return_memory

# high and low: the first 16 bytes of the text's SHA-256 as two big-endian numbers.
DOCUMENT = np.dtype([("high", ">u8"), ("low", ">u8"), ("tokens", "<u4"), ("bytes", "<u4")])
PART_BYTES = 32 << 20  # of text: the most that a process loses in a kill
_BATCH_CHARACTERS = 1 << 18  # text tokenized at a time: bounds memory, large enough for all threads
_RETURN_BYTES = 4 << 20  # of text, after which freed memory is given back; more costs memory, less time


@dataclass
class Counts:
    """How much has been tokenized and skipped."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add *other* to this."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.skipped.update(other.skipped)


@dataclass(frozen=True)
class Part:
    """A finished part."""

    prefix: Path
    """Its files without their endings."""
    records: int
    """Records of the unit up to the end of this part, those left out included."""
    last: bool
    """Whether the unit ends with it."""
    counts: Counts

    def documents(self) -> np.ndarray:
        """One row of DOCUMENT for each document, memory-mapped."""
        return _mapped(self.prefix.with_suffix(".docs"), DOCUMENT)

    def tokens(self, dtype: np.dtype[Any]) -> np.ndarray:
        """All tokens, memory-mapped."""
        return _mapped(self.prefix.with_suffix(".bin"), dtype)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def unit_key(unit: Unit, settings: str) -> str:
    """Name of the parts of *unit* under *settings* (everything else that decides its tokens)."""
    return hashlib.sha256(f"{settings}\n{unit.key}".encode("utf-8", "surrogateescape")).hexdigest()[:20]


def finished_parts(folder: Path, key: str) -> list[Part]:
    """The finished parts of a unit, from its beginning; the unit is done if ``last`` is true of the last one."""
    parts: list[Part] = []
    while not (parts and parts[-1].last):
        prefix = folder / f"{key}-{len(parts):04d}"
        try:
            marker = json.loads(prefix.with_suffix(".json").read_text("utf-8"))
            counts = Counts(
                marker["documents"], marker["tokens"], marker["bytes"], Counter(marker["skipped"])
            )
            part = Part(prefix, marker["records"], marker["last"], counts)
        except (OSError, ValueError, KeyError, TypeError):
            break
        sizes = [
            prefix.with_suffix(end).stat().st_size
            for end in (".bin", ".docs")
            if prefix.with_suffix(end).exists()
        ]
        if sizes != [marker["bin_bytes"], counts.documents * DOCUMENT.itemsize]:
            break  # another program cut or removed files: this part is made again
        parts.append(part)
    return parts


def unit_is_done(folder: Path, key: str) -> bool:
    """Whether all of the unit is tokenized."""
    parts = finished_parts(folder, key)
    return bool(parts) and parts[-1].last


def tokenize_unit(
    source: TextSource,
    unit: Unit,
    key: str,
    folder: Path,
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    report: Callable[[Counts], None],
    part_bytes: int = PART_BYTES,
    most_tokens: int | None = None,
) -> None:
    """Tokenize what is left of *unit* into *folder*, part by part.

    Args:
        report: called with the counts of every batch.
        most_tokens: the rest of the unit is skipped when its parts have more.
    """
    parts = finished_parts(folder, key)
    if parts and parts[-1].last:
        return
    done = parts[-1].records if parts else 0
    # Reading again what is tokenized already costs about a hundredth of tokenizing it.
    batches = _batches(itertools.islice(source.read(unit), done, None), part_bytes)
    number, last, tokens = len(parts), False, sum(part.counts.tokens for part in parts)
    bytes_since_return = 0  # bytes of text tokenized since memory was given back
    while not last and not (most_tokens is not None and tokens > most_tokens):
        prefix = folder / f"{key}-{number:04d}"
        writer = _PartWriter(prefix, tokenizer, dtype)
        try:
            last = True
            for documents, skipped, closes in batches:
                batch_counts = writer.add(documents, skipped)
                report(batch_counts)
                bytes_since_return += batch_counts.bytes
                if bytes_since_return >= _RETURN_BYTES:
                    return_memory()
                    bytes_since_return = 0
                if closes:
                    last = False
                    break
            done += writer.counts.documents + writer.counts.skipped.total()
            writer.finish(done, last)
            tokens += writer.counts.tokens
        except BaseException:
            writer.abandon()
            raise
        number += 1
    return_memory()


def _batches(
    records: Iterable[Document | str], part_bytes: int
) -> Iterator[tuple[list[Document], Counter[str], bool]]:
    """(documents, reasons of those left out, whether a part ends here)."""
    batch: list[Document] = []
    skipped: Counter[str] = Counter()
    characters = in_part = 0
    for record in records:
        if isinstance(record, str):
            skipped[record] += 1
            continue
        batch.append(record)
        characters += len(record.text)
        if characters >= _BATCH_CHARACTERS or in_part + characters >= part_bytes:
            in_part += characters
            closes = in_part >= part_bytes
            yield batch, skipped, closes
            batch, skipped, characters = [], Counter(), 0
            in_part = 0 if closes else in_part
    yield batch, skipped, False


class _PartWriter:
    """Writes one part under names that only this process uses, and renames them when it is complete."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self.prefix, self.tokenizer, self.dtype = prefix, tokenizer, dtype
        self.counts = Counts()
        self._partial = {end: own_path(prefix.with_suffix(end)) for end in (".bin", ".docs")}
        self._streams: dict[str, BinaryIO] = {end: path.open("wb") for end, path in self._partial.items()}

    def add(self, documents: list[Document], skipped: Counter[str]) -> Counts:
        """Tokenize and append; returns what was added."""
        batch_counts = Counts(len(documents), 0, 0, skipped)
        if documents:
            rows = np.empty(len(documents), DOCUMENT)
            digests = np.frombuffer(
                b"".join(document.digest()[:16] for document in documents), ">u8"
            ).reshape(-1, 2)
            rows["high"], rows["low"] = digests[:, 0], digests[:, 1]
            rows["bytes"] = [len(document.text.encode()) for document in documents]
            encoded = self.tokenizer.encode_batch([document.text for document in documents])
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
            tokens = np.full(int(lengths.sum()), self.tokenizer.end_of_document, np.int32)
            is_text = np.ones(tokens.size, bool)
            is_text[np.cumsum(lengths) - 1] = False  # an end-of-document token after every document
            tokens[is_text] = np.fromiter(
                itertools.chain.from_iterable(encoded), np.int32, int(is_text.sum())
            )
            limits = np.iinfo(self.dtype)
            if tokens.min() < limits.min or tokens.max() > limits.max:
                raise UserError(f"tokens: an id in {tokens.min()}..{tokens.max()} does not fit {self.dtype}")
            rows["tokens"] = lengths
            self._streams[".bin"].write(tokens.astype(self.dtype).tobytes())
            self._streams[".docs"].write(rows.tobytes())
            batch_counts.tokens, batch_counts.bytes = tokens.size, int(rows["bytes"].sum())
        self.counts.add(batch_counts)
        return batch_counts

    def finish(self, records: int, last: bool) -> None:
        """Sync and rename the files, and write the marker."""
        marker: dict[str, Any] = {
            "records": records,
            "last": last,
            "documents": self.counts.documents,
            "tokens": self.counts.tokens,
            "bytes": self.counts.bytes,
            "bin_bytes": self.counts.tokens * self.dtype.itemsize,
            "skipped": dict(sorted(self.counts.skipped.items())),
        }
        for end, stream in self._streams.items():
            stream.close()
            put_file(self._partial[end], self.prefix.with_suffix(end))
        write_atomically(self.prefix.with_suffix(".json"), json.dumps(marker))

    def abandon(self) -> None:
        """Remove what was written."""
        for end, stream in self._streams.items():
            stream.close()
            self._partial[end].unlink(missing_ok=True)
