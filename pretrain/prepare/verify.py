"""Checks a whole corpus: hashes, bounds, document ends, counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from model.declared import to_plain
from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.meta import SplitEntry
from pretrain.data.token_counts import COUNTS_FILE, stored_counts
from pretrain.utils.files import file_entry

_CHUNK = 1 << 20
_SAMPLE_TOKENS = 1 << 20


def verify(corpus: Corpus) -> Iterator[str]:
    """Check every byte of *corpus* (opening it has checked the indexes and compared sizes,
    counts and the tokenizer's hash already).

    Yields:
        A line for each check that passed.

    Raises:
        UserError: the first check that failed.
    """
    records = corpus.meta.files
    if records is None:
        yield "hashes      none recorded (a bare .bin/.idx pair has none)"
    else:
        for name, record in records.items():
            path = corpus.folder / Path(name).name
            if file_entry(path) != to_plain(record):
                raise UserError(
                    f"verify: {str(path)!r} is not what was written (its hash differs from meta.json); "
                    "prepare the corpus again"
                )
        yield f"hashes      {len(records)} files are what was written"
    for name in ("training", "validation"):
        stream: IndexedTokens = getattr(corpus, name)
        counts = stream.counts(corpus.tokenizer.vocab_size)
        ended = _documents_ended(stream, corpus.tokenizer.end_of_document)
        if records is not None and ended != stream.num_documents:
            raise UserError(
                f"verify: {stream.num_documents - ended} {name} documents of {str(corpus.folder)!r} do not "
                "end with the end-of-document token; prepare the corpus again"
            )
        yield (
            f"{name:<12}{stream.num_tokens:,} tokens are in the vocabulary of "
            f"{corpus.tokenizer.vocab_size:,}; {ended:,} of {stream.num_documents:,} documents end with "
            "their token"
        )
        if name == "training" and records is None:
            yield "counts      none stored (a bare .bin/.idx pair has none)"
        elif name == "training":
            stored = stored_counts(corpus)
            if stored is None or not np.array_equal(stored, counts):
                raise UserError(
                    f"verify: {str(corpus.folder / COUNTS_FILE)!r} does not hold the counts of the training "
                    "tokens; prepare the corpus again"
                )
            yield "counts      those stored are those of the training tokens"


def _documents_ended(stream: IndexedTokens, end: int) -> int:
    """Number of documents whose last token is *end*."""
    ended = 0
    for first in range(0, stream.num_documents, _CHUNK):
        last = min(first + _CHUNK, stream.num_documents)
        ends = stream.ends_of(first, last)
        nonempty = ends > 0
        ended += int((stream.at(ends[nonempty] - 1) == end).sum())
    return ended


def bytes_per_token(corpus: Corpus, name: str) -> float:
    """UTF-8 bytes of text per token of a split, end-of-document tokens included; for a bare pair, of its
    beginning."""
    stream: IndexedTokens = getattr(corpus, name)
    entry: SplitEntry = getattr(corpus.meta, name)
    if entry.bytes is not None:
        return entry.bytes / entry.tokens
    tokens = stream.read(0, min(stream.num_tokens, _SAMPLE_TOKENS))
    stream.check_vocabulary(tokens, corpus.tokenizer.vocab_size)
    return float(corpus.tokenizer.token_bytes()[tokens].mean())
