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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.declared import Count, declared, from_plain, to_plain
from pretrain.data.making.tokenized import BATCH_CHARACTERS, DOCUMENT, Counts, TokenizedBatch, batches
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.tokenizer import Tokenizer
from pretrain.utils.files import own_path, put_file, write_atomically
from pretrain.utils.heap import return_memory

PART_BYTES = 32 << 20  # of text: the most that a process loses in a kill
_RETURN_BYTES = 4 << 20  # of text, after which freed memory is given back; more costs memory, less time


@declared("marker")
class Marker:
    """What the marker of a part says."""

    records: Count
    """Records of the unit up to the end of this part, those left out included."""
    last: bool
    """Whether the unit ends with it."""
    documents: Count
    tokens: Count
    bytes: Count
    """Of text."""
    bin_bytes: Count
    """Of the file of tokens."""
    skipped: dict[str, Count]


@dataclass(frozen=True)
class StoredPart:
    """A finished part: a Part whose arrays are memory-mapped."""

    prefix: Path
    """Its files without their endings."""
    marker: Marker

    @property
    def counts(self) -> Counts:
        """See Part."""
        marker = self.marker
        return Counts(marker.documents, marker.tokens, marker.bytes, Counter(marker.skipped))

    def documents(self) -> np.ndarray:
        """See Part."""
        return _mapped(self.prefix.with_suffix(".docs"), DOCUMENT)

    def tokens(self, dtype: np.dtype[Any]) -> np.ndarray:
        """See Part."""
        return _mapped(self.prefix.with_suffix(".bin"), dtype)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def unit_key(unit: Unit, settings: str) -> str:
    """Name of the parts of *unit* under *settings* (everything else that decides its tokens)."""
    return hashlib.sha256(f"{settings}\n{unit.key}".encode("utf-8", "surrogateescape")).hexdigest()[:20]


def finished_parts(folder: Path, key: str, known: Sequence[StoredPart] = ()) -> list[StoredPart]:
    """The finished parts of a unit, from its beginning. *known*, the first of them, are not looked
    at again."""
    parts = list(known)
    while not is_complete(parts):
        prefix = folder / f"{key}-{len(parts):04d}"
        try:
            marker = from_plain(Marker, json.loads(prefix.with_suffix(".json").read_text("utf-8")))
            sizes = [prefix.with_suffix(end).stat().st_size for end in (".bin", ".docs")]
        except (OSError, ValueError, RecursionError):
            break
        if sizes != [marker.bin_bytes, marker.documents * DOCUMENT.itemsize]:
            break  # another program cut or removed files: this part is made again
        parts.append(StoredPart(prefix, marker))
    return parts


def is_complete(parts: Sequence[StoredPart]) -> bool:
    """Whether these, the first parts of a unit, are all of it."""
    return bool(parts) and parts[-1].marker.last


def tokenize_unit(
    source: TextSource,
    unit: Unit,
    key: str,
    folder: Path,
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    after_batch: Callable[[], object],
    part_bytes: int = PART_BYTES,
    most_tokens: int | None = None,
) -> None:
    """Tokenize what is left of *unit* into *folder*, part by part.

    Args:
        after_batch: called after every batch of documents.
        most_tokens: the rest of the unit is skipped when its parts have more.

    Raises:
        UserError: a source that cannot be read.
    """
    parts = finished_parts(folder, key)
    if is_complete(parts):
        return
    records = parts[-1].marker.records if parts else 0
    number, tokens = len(parts), sum(part.counts.tokens for part in parts)
    # Reading again what is tokenized already costs about a hundredth of tokenizing it.
    rest = itertools.islice(source.read(unit), records, None)
    upcoming = batches(rest, min(part_bytes, BATCH_CHARACTERS))
    last, unreturned = False, 0
    while not last and not (most_tokens is not None and tokens > most_tokens):
        with _PartWriter(folder / f"{key}-{number:04d}", dtype) as writer:
            while writer.counts.bytes < part_bytes:
                batch = next(upcoming, None)
                if last := batch is None:
                    break
                written = TokenizedBatch(*batch, tokenizer, dtype)
                writer.add(written)
                after_batch()
                unreturned += written.counts.bytes
                if unreturned >= _RETURN_BYTES:
                    return_memory()
                    unreturned = 0
            records += writer.counts.documents + writer.counts.skipped.total()
            writer.finish(records, last)
        tokens += writer.counts.tokens
        number += 1
    return_memory()


class _PartWriter:
    """Writes one part under names that only this process uses, and renames them when it is complete."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.counts = Counts()
        self._partial = {end: own_path(prefix.with_suffix(end)) for end in (".bin", ".docs")}

    def __enter__(self) -> _PartWriter:
        with contextlib.ExitStack() as opened:
            self._streams = {
                end: opened.enter_context(path.open("wb")) for end, path in self._partial.items()
            }
            self._opened = opened.pop_all()
        return self

    def add(self, batch: TokenizedBatch) -> None:
        """Append documents."""
        self._streams[".bin"].write(batch.tokens(self.dtype).tobytes())
        self._streams[".docs"].write(batch.documents().tobytes())
        self.counts.add(batch.counts)

    def finish(self, records: int, last: bool) -> None:
        """Sync and rename the files, and write the marker."""
        self._opened.close()
        for end, path in self._partial.items():
            put_file(path, self.prefix.with_suffix(end))
        counts = self.counts
        marker = Marker(
            records=records,
            last=last,
            documents=counts.documents,
            tokens=counts.tokens,
            bytes=counts.bytes,
            bin_bytes=counts.tokens * self.dtype.itemsize,
            skipped=dict(sorted(counts.skipped.items())),
        )
        write_atomically(self.prefix.with_suffix(".json"), json.dumps(to_plain(marker)))

    def __exit__(self, *_: object) -> None:
        """Remove what was not finished."""
        self._opened.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)
