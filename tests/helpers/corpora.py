"""What tests read of corpus folders, and make their tokenizers of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pretrain.data.corpus import Corpus
from pretrain.data.hashes import REMEMBERED
from pretrain.data.indexed import CODE_OF_DTYPE, HEADER, MAGIC, IndexedWriter

TEXTS = [f"{number} bottles stand on shelf {number * 7}\n" * 3 for number in range(100)]


def byte_level(vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2's is, trained on TEXTS."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, **options)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below *folder*, by its path; without what training remembers of them there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != REMEMBERED
    }


def texts_of(corpus: Corpus, split: str) -> list[str]:
    """The decoded documents of a split, each of which ends with its token."""
    stream, end = getattr(corpus, split), corpus.tokenizer.end_of_document
    documents = [stream.document(index) for index in range(stream.num_documents)]
    assert all(document[-1] == end and (document == end).sum() == 1 for document in documents)
    return [corpus.tokenizer.decode(document) for document in documents]


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> Path:
    """A pair of these documents; returns *prefix*."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def write_pair(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> bytearray:
    """A pair whose documents are sequences of these lengths; returns the bytes of its index."""
    lengths = np.array([length for sentences in documents for length in sentences], "<i4")
    boundaries = np.cumsum([0, *map(len, documents)]).astype("<i8")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    header = HEADER.pack(MAGIC, 1, CODE_OF_DTYPE[np.dtype(dtype)], lengths.size, boundaries.size)
    index = header + lengths.tobytes() + offsets.astype("<i8").tobytes() + boundaries.tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes((np.arange(lengths.sum()) % 97).astype(dtype).tobytes())
    return bytearray(index)
