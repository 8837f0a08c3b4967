"""Describes a corpus in words, and checks all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.hashes import damage
from pretrain.data.indexed import IndexedTokens
from pretrain.data.meta import META_FILE, PREPARE_AGAIN, Lengths, SplitEntry
from pretrain.prepare.assemble import SPLITS

_SAMPLE_TOKENS = 100
_MEASURED_TOKENS = 1 << 20


def summary(corpus: Corpus) -> str:
    """Describe a corpus, a line for each of source, tokenizer, splits, lengths and skipped documents."""
    meta, tokenizer = corpus.meta, corpus.meta.tokenizer
    lines = [f"source      {_describe_source(meta.source)}; content {meta.content_hash[:12]}"]
    if "validation" in meta.source:
        lines.append(f"held out    {_describe_source(meta.source['validation'])}")
    lossy = "; taken as lossy" if (meta.request or {}).get("lossy_tokenizer") else ""
    lines.append(
        f"tokenizer   {tokenizer.name}, {tokenizer.vocab_size:,} entries; {tokenizer.hash[:12]}{lossy}"
    )
    for name in SPLITS:
        entry: SplitEntry = getattr(meta, name)
        size = f"{entry.bytes:,} bytes, " if entry.bytes is not None else ""
        lines.append(
            f"{name:<12}{entry.documents:,} documents, {size}{entry.tokens:,} tokens, "
            f"{_bytes_per_token(corpus, name):.3f} bytes per token"
        )
    if classes := meta.classes:
        more = ", …" if len(classes) > 20 else ""
        lines.append(f"classes     {len(classes)}: {', '.join(classes[:20])}{more}")
    if lengths := meta.document_lengths:
        names = ("mean", "p10", "p50", "p90", "p99", "longest")
        lines.append(f"lengths     {', '.join(f'{n} {getattr(lengths, n):,}' for n in names)} tokens")
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta.skipped.items())
    lines.append(f"skipped     {skipped or 'none'}")
    return "\n".join(lines)


def _describe_source(source: dict[str, Any]) -> str:
    """A source of ``meta.json`` in words."""
    return ", ".join(
        f"{key} {' '.join(value) if isinstance(value, list) else value}"
        for key, value in source.items()
        if key != "validation"
    )


def _bytes_per_token(corpus: Corpus, name: str) -> float:
    """UTF-8 bytes of text per token of a split, end-of-document tokens included; for a bare pair, of its
    beginning."""
    stream: IndexedTokens = getattr(corpus, name)
    entry: SplitEntry = getattr(corpus.meta, name)
    if entry.bytes is not None:
        return entry.bytes / entry.tokens
    tokens = stream.read(0, min(stream.num_tokens, _MEASURED_TOKENS))
    stream.check_vocabulary(tokens, corpus.tokenizer.vocab_size)
    return float(corpus.tokenizer.token_bytes()[tokens].mean())


def sample(corpus: Corpus) -> str:
    """The decoded start of the training document in the middle."""
    document = corpus.training.num_documents // 2
    tokens = corpus.training.document(document)[:_SAMPLE_TOKENS]
    heading = f"sample      the first {tokens.size} tokens of training document {document}:"
    return f"{heading}\n{corpus.tokenizer.decode(tokens)}"


def verify(corpus: Corpus) -> Iterator[str]:
    """Check every byte of *corpus* (opening it has checked the indexes and compared sizes and the tokenizer's
    hash already).

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
            if problem := damage(corpus.folder / name, record):
                raise UserError(f"verify: {problem}")
        yield f"hashes      {len(records)} files are what was written"
    # In a folder, a sequence of the index is a document.
    found = Lengths.from_lengths(np.concatenate([corpus.training.lengths, corpus.validation.lengths]))
    if (said := corpus.meta.document_lengths) not in (None, found):
        path = str(corpus.folder / META_FILE)
        raise UserError(f"verify: {path!r} says {said}, but it is {found}; {PREPARE_AGAIN}")
    for name in SPLITS:
        stream: IndexedTokens = getattr(corpus, name)
        stream.counts(corpus.tokenizer.vocab_size)
        yield (
            f"{name:<12}{stream.num_tokens:,} tokens of {stream.num_documents:,} documents are in the "
            f"vocabulary of {corpus.tokenizer.vocab_size:,}"
        )
