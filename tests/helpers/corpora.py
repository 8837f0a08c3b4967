"""What tests read of corpus folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.corpus import Corpus
from pretrain.data.indexed import CODE_OF_DTYPE, HEADER, MAGIC


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below *folder*, by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def texts_of(corpus: Corpus, split: str) -> list[str]:
    """The decoded documents of a split, each of which ends with its token."""
    stream, end = getattr(corpus, split), corpus.tokenizer.end_of_document
    documents = [stream.document(index) for index in range(stream.num_documents)]
    assert all(document[-1] == end and (document == end).sum() == 1 for document in documents)
    return [corpus.tokenizer.decode(document) for document in documents]


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
