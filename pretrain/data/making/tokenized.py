"""Tokenized documents on their way into a corpus folder."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from model.errors import UserError
from pretrain.data.making.progress import Progress
from pretrain.data.sources.source import Document
from pretrain.data.tokenizer import Tokenizer

# high and low: the first 16 bytes of the text's SHA-256 as two big-endian numbers.
DOCUMENT = np.dtype([("high", ">u8"), ("low", ">u8"), ("tokens", "<u4"), ("bytes", "<u4")])
BATCH_CHARACTERS = 1 << 18  # text tokenized at a time: bounds memory, large enough for all threads


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


def tokenizing(counts: Counts, total_bytes: int, seconds: float, bytes_before: int = 0) -> Progress:
    """The report that this much has been tokenized; see Progress."""
    return Progress(
        "tokenizing",
        counts.documents,
        counts.tokens,
        counts.bytes,
        total_bytes,
        seconds,
        bytes_before,
        counted=True,
    )


class Part(Protocol):
    """Some documents of a source, tokenized."""

    @property
    def counts(self) -> Counts:
        """What is in it."""

    def documents(self) -> np.ndarray:
        """One row of DOCUMENT for each document."""

    def tokens(self, dtype: np.dtype[Any]) -> np.ndarray:
        """All tokens, back to back."""


class TokenizedBatch:
    """A part in memory, made of documents.

    Args:
        skipped: reasons of documents that were left out among these.

    Raises:
        UserError: a token that does not fit *dtype*.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        skipped: Counter[str],
        tokenizer: Tokenizer,
        dtype: np.dtype[Any],
    ) -> None:
        self._rows = np.empty(len(documents), DOCUMENT)
        digests = np.array([document.digest()[:16] for document in documents], "V16").view(">u8")
        self._rows["high"], self._rows["low"] = digests[::2], digests[1::2]
        self._rows["bytes"] = [len(document.text.encode()) for document in documents]
        encoded = tokenizer.encode_batch([document.text for document in documents])
        for ids in encoded:
            ids.append(tokenizer.end_of_document)
        self._rows["tokens"] = [len(ids) for ids in encoded]
        total = int(self._rows["tokens"].sum(dtype=np.int64))
        tokens = np.fromiter(itertools.chain.from_iterable(encoded), np.int64, total)
        limits = np.iinfo(dtype)
        if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
            raise UserError(f"tokens: an id in {tokens.min()}..{tokens.max()} does not fit {dtype}")
        self._tokens = tokens.astype(dtype)
        size = int(self._rows["bytes"].sum(dtype=np.int64))
        self.counts = Counts(len(documents), tokens.size, size, skipped)

    def documents(self) -> np.ndarray:
        """See Part."""
        return self._rows

    def tokens(self, dtype: np.dtype[Any]) -> np.ndarray:
        """See Part."""
        return self._tokens


def batches(
    records: Iterable[Document | str], most_characters: int = BATCH_CHARACTERS
) -> Iterator[tuple[list[Document], Counter[str]]]:
    """Yield documents, about *most_characters* at a time, and the reasons of those left out among them.

    The last batch may hold none.
    """
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
    yield documents, skipped
