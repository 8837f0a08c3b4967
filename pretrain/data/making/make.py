"""Makes a corpus folder from a text source and a tokenizer, written once and atomically.

    OUT/training.bin .idx, validation.bin .idx   Megatron format; every document ends with its token
    OUT/tokenizer/                               what load_tokenizer reads
    OUT/training_counts.npy                      how often each token occurs in the training split
    OUT/meta.json                                what is in the folder and what it was made from

The same source and settings give byte-identical folders, here and in pretrain.prepare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.declared import declared
from model.errors import UserError
from pretrain.data.indexed import token_dtype
from pretrain.data.making.assemble import DEFAULT_SELECTION, Selection, assemble
from pretrain.data.making.folder import new_folder, to_be_made
from pretrain.data.making.progress import Every, ProgressCallback
from pretrain.data.making.tokenized import Counts, Part, TokenizedBatch, batches, tokenizing
from pretrain.data.making.train_tokenizer import most_bytes_read, train_tokenizer_on, training_request
from pretrain.data.meta import FORMAT_VERSION, CorpusMeta, TokenizerEntry
from pretrain.data.sources.source import TextSource
from pretrain.data.tokenizer import Tokenizer, tokenizer_hash
from pretrain.utils.heap import return_memory

REPORT_SECONDS = 1.0
VOCABULARIES = range(260, 1_000_001)
"""Entries that a trained tokenizer may have: 256 bytes, two special tokens and some text at least."""


def check_vocabulary(size: int) -> None:
    """Raise UserError if a tokenizer of *size* entries is not trained."""
    if size not in VOCABULARIES:
        raise UserError(
            f"train_tokenizer: {size} is not valid; give {VOCABULARIES.start} to {VOCABULARIES.stop - 1}"
        )


@dataclass(frozen=True)
class Order:
    """What a corpus is made of.

    Raises:
        UserError: a source that cannot be used as it is, a tokenizer that does not spell the text, or a size
            out of range.
    """

    source: TextSource
    tokenizer: Tokenizer | int
    """An integer trains a SentencePiece model of so many entries on the training split."""
    selection: Selection = DEFAULT_SELECTION

    def __post_init__(self) -> None:
        if isinstance(self.tokenizer, int):
            check_vocabulary(self.tokenizer)
        else:
            self.tokenizer.check_spelling()
        self.source.check()

    def request(self) -> dict[str, Any]:
        """All that decides the content of the folder; options appear only when used."""
        chosen = asdict(self.selection)
        fraction = chosen.pop("validation_fraction")
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source.fingerprint(),
            "tokenizer": tokenizer_request(self.tokenizer),
            "validation_fraction": fraction,
            **{key: value for key, value in chosen.items() if value},
        }

    def made_tokenizer(self, report: ProgressCallback) -> Tokenizer:
        """The tokenizer, trained if it is to be."""
        if not isinstance(self.tokenizer, int):
            return self.tokenizer
        chosen = self.selection
        return train_tokenizer_on(
            self.source,
            self.tokenizer,
            chosen.validation_fraction,
            chosen.validation_documents,
            most_bytes_read(chosen.max_tokens),
            report,
        )

    def plan(self, tokenizer: Tokenizer, request: dict[str, Any]) -> Plan:
        """What is written about the corpus, made with *tokenizer*."""
        source = self.source
        entry = TokenizerEntry.of(tokenizer)
        return Plan(request, source.describe(), source.origin(), source.extent(), entry, self.selection)


def tokenizer_request(tokenizer: Tokenizer | int) -> str:
    """What identifies a tokenizer, or one that is to be trained."""
    return training_request(tokenizer) if isinstance(tokenizer, int) else tokenizer_hash(tokenizer)


@declared("plan")
class Plan:
    """All that is written about a corpus besides what its parts say."""

    request: dict[str, Any]
    source: dict[str, Any]
    origin: dict[str, Any]
    """The source's local files."""
    extent: str
    tokenizer: TokenizerEntry
    selection: Selection


def write_corpus(
    folder: Path, plan: Plan, parts: Sequence[Part], validation_parts: int | None = None
) -> CorpusMeta:
    """Write all of a corpus but its tokenizer into *folder*, from *parts*, in order.

    Args:
        validation_parts: this many of *parts*, the first ones, are the validation split, and the others the
            training split; None holds documents out by their hash.

    Raises:
        UserError: no document, or too few to split.
    """
    selection, vocab_size = plan.selection, plan.tokenizer.vocab_size
    written = assemble(parts, folder, vocab_size, selection, plan.extent, validation_parts)
    split: dict[str, Any] = {"by": "hash of the document's text"}
    if validation_parts is not None:
        split = {"by": "a source of its own"}
    elif selection.validation_documents is None:
        split["validation_fraction"] = selection.validation_fraction
    else:
        split["validation_documents"] = selection.validation_documents
    meta = CorpusMeta(
        source=plan.source,
        source_files=plan.origin,
        tokenizer=plan.tokenizer,
        dtype=token_dtype(vocab_size).name,
        split=split,
        request=plan.request,
        **written,
    )
    meta.write(folder)
    return meta


def make_corpus(
    source: TextSource,
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | int,
    selection: Selection = DEFAULT_SELECTION,
    report: ProgressCallback = lambda _: None,
) -> Path:
    """Write the corpus folder *out* from *source*, in this process and in memory, and return it.

    A folder that already holds this very corpus is left alone; any other content of *out* is refused. Several
    processes may call this at once: one works, the others wait.

    Args:
        tokenizer: an integer trains a SentencePiece model of so many entries on the training split.

    Raises:
        UserError: bad input.
    """
    order, out = Order(source, tokenizer, selection), Path(out)
    request = order.request()
    with to_be_made(out, request, report) as to_do:
        if not to_do:
            return out
        made = order.made_tokenizer(report)
        plan, dtype = order.plan(made, request), token_dtype(made.vocab_size)
        parts, counts, validation_parts = list[TokenizedBatch](), Counts(), None
        due, started = Every(REPORT_SECONDS), time.monotonic()
        for number, unit in enumerate(source.units()):
            if number == source.held_out_units():
                validation_parts = len(parts)
            for batch in batches(source.read(unit)):
                parts.append(TokenizedBatch(*batch, made, dtype))
                counts.add(parts[-1].counts)
                if due():
                    report(tokenizing(counts, 0, time.monotonic() - started))
        report(tokenizing(counts, counts.bytes, time.monotonic() - started))
        with new_folder(out) as folder:
            made.save(folder / "tokenizer")
            write_corpus(folder, plan, parts, validation_parts)
    return_memory()
    return out
