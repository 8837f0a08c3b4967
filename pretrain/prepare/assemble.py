"""Assembles parts into the two splits of a corpus: which documents are kept, in which split, and their
statistics.

The result depends only on the parts and their order. Memory: about twenty bytes a document.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from model.declared import PositiveInt, declared
from model.errors import UserError
from pretrain.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from pretrain.data.meta import FileEntry, Lengths, SplitEntry
from pretrain.prepare.parts import Part
from pretrain.prepare.sources.text_source import describe_no_documents
from pretrain.prepare.split import VALIDATION_FRACTION, Split
from pretrain.utils.files import file_entry

SPLITS = ("training", "validation")
_PARTITION = 1 << 22  # digests compared at a time, about 150 MB


@declared()
class Selection:
    """Which documents a corpus takes, and how it splits them."""

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = VALIDATION_FRACTION
    """Of documents, held out by the hash of their text."""
    drop_duplicates: bool = False
    """Keep the first of documents with equal text only."""
    max_tokens: PositiveInt | None = None
    """Keep documents, in order, while both splits together have at most this many tokens."""


DEFAULT_SELECTION = Selection()


def tokens_kept(parts: Sequence[Part], selection: Selection) -> int:
    """Tokens of *parts* that count against ``max_tokens``."""
    if not selection.drop_duplicates:
        return sum(part.marker.tokens for part in parts)
    is_kept = _first_occurrences(parts)
    return sum(int(rows["tokens"][is_kept[place]].sum(dtype=np.int64)) for rows, place in _rows(parts))


def _rows(parts: Sequence[Part]) -> Iterator[tuple[np.ndarray, slice]]:
    """The documents of each part, and where they lie among all documents."""
    start = 0
    for part in parts:
        rows = part.documents()
        yield rows, slice(start, start + rows.size)
        start += rows.size


def _first_occurrences(parts: Sequence[Part]) -> np.ndarray:
    """True for every document whose text does not occur earlier, bool [documents]."""
    total = sum(part.marker.documents for part in parts)
    first = np.ones(total, bool)
    partitions = max(1, -(-total // _PARTITION))
    for partition in range(partitions):
        found: list[np.ndarray] = []
        for rows, place in _rows(parts):
            members = np.flatnonzero(rows["low"] % np.uint64(partitions) == partition)
            chosen = rows[members]
            columns = [chosen["high"], chosen["low"], members + place.start]
            found.append(np.stack([column.astype(np.uint64) for column in columns]))
        high, low, index = np.concatenate(found, axis=1)
        order = np.lexsort((index, low, high))
        high, low, index = high[order], low[order], index[order]
        repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        first[index[1:][repeated].astype(np.int64)] = False
    return first


def _cut(parts: Sequence[Part], is_kept: np.ndarray, max_tokens: int) -> tuple[list[Part], int]:
    """Clear *is_kept* for the documents that do not fit under the cap; returns the parts up to the cut, and
    the number of documents before it."""
    total = 0
    for number, (rows, place) in enumerate(_rows(parts)):
        ends = total + np.cumsum(np.where(is_kept[place], rows["tokens"], 0), dtype=np.int64)
        fits = int(np.searchsorted(ends, max_tokens, side="right"))
        if fits < rows.size:
            is_kept[place.start + fits :] = False
            if not is_kept.any():
                raise UserError(
                    f"max_tokens: the first document alone has more than {max_tokens} tokens; valid: at "
                    f"least {int(ends[fits])}"
                )
            return list(parts[: number + 1]), place.start + fits
        total = int(ends[-1]) if ends.size else total
    return list(parts), is_kept.size


def assemble(
    parts: Sequence[Part],
    folder: Path,
    vocab_size: int,
    selection: Selection,
    name: str,
    validation_parts: int | None = None,
) -> dict[str, Any]:
    """Write both splits into *folder*, from *parts*, in order.

    Args:
        vocab_size: V, of the tokenizer; it decides the type of the tokens.
        name: of the source, for messages.
        validation_parts: this many of *parts*, the first ones, are the validation split, and the others the
            training split; None holds documents out by their hash.

    Returns:
        The entries of CorpusMeta about it.

    Raises:
        UserError: no document, or too few to split.
    """
    total = sum(part.marker.documents for part in parts)
    if not total:
        raise UserError(
            describe_no_documents(name, sum((Counter(part.marker.skipped) for part in parts), Counter()))
        )
    is_kept = _first_occurrences(parts) if selection.drop_duplicates else np.ones(total, bool)
    used, documents_considered = list(parts), total
    if selection.max_tokens is not None:
        used, documents_considered = _cut(parts, is_kept, selection.max_tokens)
    split = None
    if validation_parts is None:
        kept = (rows["high"][is_kept[place]] for rows, place in _rows(used))
        ends = (int(end) for numbers in kept if numbers.size for end in (numbers.min(), numbers.max()))
        try:
            split = Split.choose(ends, selection.validation_fraction)
        except UserError:
            if documents_considered == total:
                raise
            raise UserError(
                f"max_tokens: {selection.max_tokens:,} leaves a single document, and one is held out for "
                "validation; give more, or --validation_text FILE, which holds out none"
            ) from None
    else:
        _check_both(used, is_kept, validation_parts)
    content = {name: hashlib.sha256() for name in SPLITS}
    sizes: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    dtype = token_dtype(vocab_size)
    with contextlib.ExitStack() as opened:
        writers = {name: opened.enter_context(IndexedWriter(folder / name, dtype)) for name in SPLITS}
        for index, (part, (rows, place)) in enumerate(zip(used, _rows(used), strict=True)):
            held_out = np.full(rows.size, index < (validation_parts or 0))
            if split is not None:
                held_out = split.held_out(rows["high"].astype(np.uint64))
            tokens, token_lengths = part.tokens(dtype), rows["tokens"].astype(np.int64)
            skipped.update(part.marker.skipped)
            for name, writer in writers.items():
                chosen = is_kept[place] & (held_out == (name == "validation"))
                writer.add_documents(tokens[np.repeat(chosen, token_lengths)], token_lengths[chosen])
                sizes[name] += int(rows["bytes"][chosen].sum(dtype=np.int64))
                content[name].update(np.stack([rows["high"][chosen], rows["low"][chosen]], axis=1).tobytes())
    if selection.drop_duplicates:
        skipped["duplicate"] = documents_considered - int(is_kept.sum())
    digests = " ".join(content[name].hexdigest() for name in SPLITS)
    return {
        "content_hash": hashlib.sha256(digests.encode()).hexdigest(),
        "skipped": {reason: count for reason, count in sorted(skipped.items()) if count},
        **entries(writers, sizes),
    }


def entries(writers: dict[str, IndexedWriter], sizes: dict[str, int]) -> dict[str, Any]:
    """The entries of CorpusMeta about the splits that these closed writers have written, and their files.

    Args:
        sizes: bytes of text of each split.
    """
    lengths = np.concatenate([writer.lengths for writer in writers.values()])
    return {
        **{
            name: SplitEntry(writer.lengths.size, sizes[name], writer.num_tokens)
            for name, writer in writers.items()
        },
        "document_lengths": Lengths.from_lengths(lengths),
        "files": {
            path.name: FileEntry(**file_entry(path))
            for writer in writers.values()
            for path in (bin_path(writer.prefix), idx_path(writer.prefix))
        },
    }


def _check_both(parts: Sequence[Part], is_kept: np.ndarray, validation_parts: int) -> None:
    """Raise UserError if one of the two sources has no document left."""
    held_out = sum(part.marker.documents for part in parts[:validation_parts])
    for name, kept_documents in (("validation", is_kept[:held_out]), ("training", is_kept[held_out:])):
        if not kept_documents.any():
            raise UserError(
                f"corpus: no usable document for {name}; needed: UTF-8 text for training and for validation, "
                "and max_tokens (if given) that leave room for both"
            )
