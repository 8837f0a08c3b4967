"""Describes a corpus in words, and draws how long its documents are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.corpus import Corpus
from pretrain.prepare.verify import bytes_per_token
from pretrain.utils.plotting import saved_figure

LENGTHS_FILE = "document_lengths.png"
_SAMPLE_TOKENS = 100


def summary(corpus: Corpus) -> str:
    """Describe a corpus, a line for each of source, tokenizer, splits, lengths and skipped documents."""
    meta, tokenizer = corpus.meta, corpus.meta.tokenizer
    lines = [f"source      {described(meta.source)}; content {meta.content_hash[:12]}"]
    if "validation" in meta.source:
        lines.append(f"held out    {described(meta.source['validation'])}")
    lines.append(f"tokenizer   {tokenizer.name}, {tokenizer.vocab_size:,} entries; {tokenizer.hash[:12]}")
    for name, entry in (("training", meta.training), ("validation", meta.validation)):
        size = f"{entry.bytes:,} bytes, " if entry.bytes is not None else ""
        lines.append(
            f"{name:<12}{entry.documents:,} documents, {size}{entry.tokens:,} tokens, "
            f"{bytes_per_token(corpus, name):.3f} bytes per token"
        )
    if classes := meta.classes:
        more = ", …" if len(classes) > 20 else ""
        lines.append(f"classes     {len(classes)}: {', '.join(classes[:20])}{more}")
    if lengths := meta.document_lengths:
        names = ("mean", "p10", "p50", "p90", "p99", "longest")
        lines.append(f"lengths     {', '.join(f'{name} {lengths[name]:,}' for name in names)} tokens")
    skipped = ", ".join(f"{count} {reason}" for reason, count in meta.skipped.items())
    lines.append(f"skipped     {skipped or 'none'}")
    return "\n".join(lines)


def described(source: dict[str, Any]) -> str:
    """A source of ``meta.json`` in words."""
    return ", ".join(
        f"{key} {' '.join(value) if isinstance(value, list) else value}"
        for key, value in source.items()
        if key != "validation"
    )


def sample(corpus: Corpus) -> str:
    """The decoded start of the training document in the middle."""
    document = corpus.training.num_documents // 2
    tokens = corpus.training.document(document)[:_SAMPLE_TOKENS]
    heading = f"sample      the first {tokens.size} tokens of training document {document}:"
    return f"{heading}\n{corpus.tokenizer.decode(tokens)}"


def draw_lengths(summary: dict[str, Any], out: Path) -> None:
    """Draw the histogram of ``document_lengths`` as a PNG."""
    histogram = summary["histogram"]
    documents = histogram["documents"]
    edges = 2.0 ** ((histogram["from_2_to_the_eighths"] + np.arange(len(documents) + 1)) / 8)
    with saved_figure(out, "out", size=(7, 4), dpi=120) as (_, axis):
        axis.stairs(documents, edges, fill=True)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens in the document, its end included")
        axis.set_ylabel("documents")
        axis.set_title(
            f"mean {summary['mean']:,}, median {summary['p50']:,}, longest {summary['longest']:,} tokens"
        )
