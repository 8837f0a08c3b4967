"""Writes and reads the tokenized parts of an unfinished corpus: finished parts survive any kill.

A unit of the source becomes one or more parts. A part is

    KEY-0000.bin     its tokens, back to back
    KEY-0000.docs    a row of DOCUMENT for every document
    KEY-0000.json    its marker, written last: how far into the unit it goes, and what is in it

KEY is a hash of the unit and of everything that decides its tokens. So every run that asks for the same can
use a part, and no other run does.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model.declared import NonNegativeInt, declared, from_dict, to_dict
from pretrain.data.indexed import token_dtype
from pretrain.data.tokenizer import Tokenizer
from pretrain.prepare.long_texts import TOKENIZED_AT_ONCE, encode_documents
from pretrain.prepare.sources.text_source import Document, TextSource, Unit
from pretrain.utils.files import atomic_file, read_regular, write_atomically
from pretrain.utils.malloc import return_memory

# high and low: the first 16 bytes of the text's SHA-256 as two big-endian numbers.
DOCUMENT = np.dtype([("high", ">u8"), ("low", ">u8"), ("tokens", "<u4"), ("bytes", "<u4")])
PART_BYTES = 32 << 20  # of text: the most that a process loses in a kill
_RETURN_BYTES = 4 << 20  # of text, after which freed memory is given back; more costs memory, less time


@declared("marker", frozen=False)
class Marker:
    """What the marker of a part says."""

    records: NonNegativeInt
    """Records of the unit up to the end of this part, those left out included."""
    last: bool = False
    """Whether the unit ends with it."""
    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    """Of text."""
    bin_bytes: NonNegativeInt = 0
    """Of the file of tokens."""
    skipped: dict[str, NonNegativeInt] = field(default_factory=dict)
    """Number of documents left out, by reason."""
    with_control_strings: NonNegativeInt = 0
    """Documents whose text contains a control string of the tokenizer."""


@dataclass(frozen=True)
class Part:
    """A finished part."""

    prefix: Path
    """Its files without their endings."""
    marker: Marker

    def documents(self) -> np.ndarray:
        """A row of DOCUMENT for each document, memory-mapped."""
        return _map_part(self.prefix.with_suffix(".docs"), DOCUMENT)

    def tokens(self, dtype: np.dtype[Any]) -> np.ndarray:
        """All tokens, back to back, memory-mapped."""
        return _map_part(self.prefix.with_suffix(".bin"), dtype)


def _map_part(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def unit_key(unit: Unit, settings: str) -> str:
    """Name of the parts of *unit* under *settings* (everything else that decides its tokens)."""
    return hashlib.sha256(f"{settings}\n{unit.key}".encode("utf-8", "surrogateescape")).hexdigest()[:20]


def find_finished_parts(folder: Path, key: str, known: Sequence[Part] = ()) -> list[Part]:
    """The finished parts of a unit, from its beginning. *known*, the first of them, are not looked
    at again."""
    parts = list(known)
    while not is_complete(parts):
        prefix = folder / f"{key}-{len(parts):04d}"
        try:
            marker = from_dict(Marker, json.loads(read_regular(prefix.with_suffix(".json"), 1 << 20)))
            sizes = [prefix.with_suffix(end).stat().st_size for end in (".bin", ".docs")]
        except (OSError, ValueError, RecursionError):
            break
        if sizes != [marker.bin_bytes, marker.documents * DOCUMENT.itemsize]:
            break  # another program cut or removed files: this part is made again
        parts.append(Part(prefix, marker))
    return parts


def is_complete(parts: Sequence[Part]) -> bool:
    """Whether these, the first parts of a unit, are all of it."""
    return bool(parts) and parts[-1].marker.last


@dataclass(frozen=True)
class Job:
    """How units become parts."""

    source: TextSource
    folder: Path
    """Of the parts."""
    tokenizer_folder: Path
    """Where the tokenizer is saved, for other processes."""
    part_bytes: int = PART_BYTES
    most_tokens: int | None = None
    """The rest of a unit is skipped when its parts have more."""

    def tokenize(self, unit: Unit, key: str, tokenizer: Tokenizer) -> Iterator[None]:
        """Tokenize what is left of *unit*, part by part; yields after every batch of documents.

        Raises:
            UserError: a source that cannot be read.
        """
        parts = find_finished_parts(self.folder, key)
        tokens = sum(part.marker.tokens for part in parts)
        records = parts[-1].marker.records if parts else 0
        # Reading again what is tokenized already costs about a hundredth of tokenizing it.
        rest = itertools.islice(self.source.read(unit), records, None)
        upcoming = _batches(rest, min(self.part_bytes, TOKENIZED_AT_ONCE))
        while not is_complete(parts) and not (self.most_tokens is not None and tokens > self.most_tokens):
            part = Part(self.folder / f"{key}-{len(parts):04d}", Marker(records))
            yield from _write_part(part, upcoming, tokenizer, self.part_bytes)
            parts.append(part)
            records, tokens = part.marker.records, tokens + part.marker.tokens
        return_memory()


def _write_part(
    part: Part,
    upcoming: Iterator[tuple[list[Document], Counter[str]]],
    tokenizer: Tokenizer,
    part_bytes: int,
) -> Iterator[None]:
    """Write the documents of *upcoming*, until there are *part_bytes*, and fill the marker; yields after
    every batch."""
    dtype, marker, unreturned = token_dtype(tokenizer.vocab_size), part.marker, 0
    skipped: Counter[str] = Counter()
    control_strings = re.compile("|".join(map(re.escape, tokenizer.special_texts())))
    with contextlib.ExitStack() as opened:
        paths = [opened.enter_context(atomic_file(part.prefix.with_suffix(end))) for end in (".bin", ".docs")]
        streams = [opened.enter_context(path.open("wb")) for path in paths]
        while marker.bytes < part_bytes and not marker.last:
            documents, left_out = next(upcoming, ([], Counter[str]()))
            marker.last = not documents  # the last batch is empty
            rows, lengths = _rows(documents), list[int]()
            found = sum(control_strings.search(document.text) is not None for document in documents)
            marker.with_control_strings += found
            texts = (document.text for document in documents)
            for tokens, some in encode_documents(tokenizer, texts, dtype):
                streams[0].write(tokens.data)
                lengths += some
            rows["tokens"] = lengths
            streams[1].write(rows.tobytes())
            del documents[:], texts  # before the next are read
            size = int(rows["bytes"].sum(dtype=np.int64))
            skipped += left_out
            marker.documents += len(rows)
            marker.tokens += sum(lengths)
            marker.bytes += size
            yield
            if (unreturned := unreturned + size) >= _RETURN_BYTES:
                return_memory()
                unreturned = 0
    marker.records += marker.documents + skipped.total()
    marker.bin_bytes, marker.skipped = marker.tokens * dtype.itemsize, dict(sorted(skipped.items()))
    write_atomically(part.prefix.with_suffix(".json"), json.dumps(to_dict(marker)))


def _rows(documents: Sequence[Document]) -> np.ndarray:
    """A row of DOCUMENT for each, whose tokens are not counted yet."""
    rows = np.empty(len(documents), DOCUMENT)
    digests = np.array([document.digest()[:16] for document in documents], "V16").view(">u8")
    rows["high"], rows["low"] = digests[::2], digests[1::2]
    rows["bytes"] = [len(document.text.encode()) for document in documents]
    return rows


def _batches(
    records: Iterable[Document | str], most_characters: int
) -> Iterator[tuple[list[Document], Counter[str]]]:
    """Yield documents, about *most_characters* at a time, and the reasons of those left out among them. The
    last batch, and no other, is without documents."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    characters = 0
    for record in records:
        if isinstance(record, str):
            skipped[record] += 1
            continue
        documents.append(record)
        characters += len(record.text)
        if characters >= most_characters:
            yield documents, skipped
            documents, skipped, characters = [], Counter(), 0
    if documents:
        yield documents, skipped
        skipped = Counter()
    yield [], skipped
