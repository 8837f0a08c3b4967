"""Trains a tokenizer on the training split of a source that will be tokenized, in one pass over its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from pretrain.data.tokenizer import SENTENCEPIECE_OPTIONS, SentencePieceTokenizer
from pretrain.prepare.progress import Progress, Report
from pretrain.prepare.sources.text_source import Document, TextSource
from pretrain.prepare.split import Split, digest_to_number

# The tokenizer learns from at most this much of the training split (a sample by document hash): the trainer
# holds its text in memory, and its pieces hardly change beyond.
SAMPLE_BYTES = 200_000_000
# A corpus with a cap on its tokens is the beginning of its source. This many bytes of it per token are read
# for its tokenizer: English text has four bytes a token, other scripts up to seven.
_BYTES_PER_TOKEN = 8
_FEWEST_DOCUMENTS = 1000  # read however long they are: one of them alone leaves nothing to hold out


def training_request(vocab_size: int) -> str:
    """The settings that decide a trained tokenizer, besides its source and the split."""
    options = json.dumps(SENTENCEPIECE_OPTIONS, sort_keys=True)
    return f"train {vocab_size} {hashlib.sha256(options.encode()).hexdigest()[:16]} {SAMPLE_BYTES}"


def most_bytes_read(max_tokens: int | None) -> int | None:
    """Bytes of text from which the tokenizer of a corpus of at most *max_tokens* is trained; None:
    all text."""
    return None if max_tokens is None else max(SAMPLE_BYTES, _BYTES_PER_TOKEN * max_tokens)


def train_tokenizer_on(
    source: TextSource, vocab_size: int, fraction: float, most_bytes: int | None, report: Report
) -> SentencePieceTokenizer:
    """Train a SentencePiece tokenizer of *vocab_size* entries.

    Args:
        fraction: what is held out (see Split.choose), unless the source has a separate validation text.
        most_bytes: of text that is read; None reads the whole source.

    Raises:
        UserError: fewer than two different documents, or too little text for so many entries.
    """
    report(f"reading {source.name}")
    sample, progress = Sample(SAMPLE_BYTES), Progress(f"reading {source.name}", report)

    for document in source.documents():
        sample.add(document)
        if progress.is_due():
            progress(sample.documents, sample.bytes)
        enough = most_bytes is not None and sample.bytes >= most_bytes
        if enough and sample.documents >= _FEWEST_DOCUMENTS:
            break
    split = Split(0)  # nothing is held out
    if source.held_out_units() is None:
        # With a cap on tokens the corpus itself may hold out others of its documents.
        split = Split.choose(sample.ends, fraction)
    report(f"training a tokenizer of {vocab_size:,} entries on {sample.bytes / 1e6:.1f} MB")
    return SentencePieceTokenizer.train(sample.texts(split), vocab_size)


class Sample:
    """A sample of documents in their order, chosen evenly by their hash, of about *most_bytes*.

    The share that is kept shrinks while documents are added. In the end it is the same as if the size of all
    text had been known at the beginning.
    """

    def __init__(self, most_bytes: int) -> None:
        self.documents = 0
        """Documents added so far."""
        self.bytes = 0
        """Bytes of their text."""
        self.ends = (2**64, -1)
        """The smallest and the largest number of a document (see digest_to_number)."""
        self._most = most_bytes
        self._kept: list[tuple[bytes, int, str]] = []
        """Digest, bytes and text."""
        self._kept_bytes = 0
        self._drop_at = most_bytes

    def add(self, document: Document) -> None:
        """Add a document."""
        digest, size = document.digest(), len(document.text.encode())
        self.documents += 1
        self.bytes += size
        number = digest_to_number(digest)
        self.ends = min(self.ends[0], number), max(self.ends[1], number)
        if _second_number(digest) < self._limit():
            self._kept.append((digest, size, document.text))
            self._kept_bytes += size
            if self._kept_bytes > self._drop_at:
                self._drop()

    def texts(self, split: Split) -> Iterator[str]:
        """The sampled texts that are not held out."""
        self._drop()
        return (text for digest, _, text in self._kept if not split.is_validation(digest))

    def _limit(self) -> int:
        return int(min(1.0, self._most / max(self.bytes, 1)) * 2**64)

    def _drop(self) -> None:
        limit = self._limit()
        self._kept = [entry for entry in self._kept if _second_number(entry[0]) < limit]
        self._kept_bytes = sum(size for _, size, _ in self._kept)
        self._drop_at = max(self._most, self._kept_bytes) * 5 // 4


def _second_number(digest: bytes) -> int:
    return int.from_bytes(digest[8:16], "big")  # the bytes before decide the split
