"""Megatron's ``.bin/.idx`` corpus format: a writer and a memory-mapped reader.

The ``.bin`` file is the documents' tokens, back to back. The ``.idx`` file is, little-endian: the magic
``MMIDIDX\\0\\0``, a uint64 version (1), a uint8 dtype code, uint64 counts of sequences S and of document
boundaries D, then int32 sequence lengths [S], int64 byte offsets [S] and int64 document boundaries [D]
(indices of sequences, starting with 0). It is the format of megatron.core.datasets.indexed_dataset, written
here byte for byte as its builder does (the tests compare both ways); importing that module costs seconds and
PyTorch in every process that only wants to read tokens.
"""

from __future__ import annotations

import copy
import errno
import os
import struct
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.utils.files import open_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Codes of megatron.core.datasets.indexed_dataset.DType that hold tokens.
DTYPE_OF_CODE = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
CODE_OF_DTYPE = {np.dtype(name): code for code, name in DTYPE_OF_CODE.items()}
_CHECK_CHUNK = 1 << 20  # sequences written or verified at a time: bounds the memory of a large index


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that Megatron's tools choose for a vocabulary: uint16 below 65,500 tokens, else int32."""
    return np.dtype(np.uint16) if vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The token file of the corpus *prefix*."""
    return Path(os.fspath(prefix) + ".bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file of the corpus *prefix*."""
    return Path(os.fspath(prefix) + ".idx")


class IndexedWriter:
    """Writes documents to ``PREFIX.bin`` and, when closed, ``PREFIX.idx``; both are synced to disk.

    Memory: 4 bytes a document.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[Any]) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._lengths = array("i")
        self._stream = bin_path(prefix).open("wb")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document written so far, int32 [documents]."""
        return np.array(self._lengths, np.int32)

    def add_document(self, tokens: Any) -> None:
        """Append one document: a sequence of token ids that fit the dtype (else UserError)."""
        values = np.asarray(tokens, np.int64)
        limits = np.iinfo(self.dtype)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise UserError(
                f"tokens: an id in {values.min()}..{values.max()} does not fit {self.dtype}; "
                f"valid: {limits.min}..{limits.max}"
            )
        self.add_documents(values.astype(self.dtype), np.array([values.size]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents that lie back to back in *tokens*, which has the writer's dtype already."""
        if tokens.dtype != self.dtype or tokens.size != int(lengths.sum()):
            raise ValueError(f"{tokens.size} tokens of {tokens.dtype} for lengths of {int(lengths.sum())}")
        self._stream.write(tokens.tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.num_tokens += tokens.size

    def close(self) -> None:
        """Write the index and sync both files."""
        _sync_and_close(self._stream)
        lengths = self.lengths
        stream = idx_path(self.prefix).open("wb")
        stream.write(HEADER.pack(MAGIC, 1, CODE_OF_DTYPE[self.dtype], lengths.size, lengths.size + 1))
        stream.write(lengths.astype("<i4", copy=False).data)
        total = 0
        for start in range(0, lengths.size, _CHECK_CHUNK):
            ends = np.cumsum(lengths[start : start + _CHECK_CHUNK], dtype=np.int64) + total
            starts = np.concatenate([[total], ends[:-1]])
            stream.write((starts * self.dtype.itemsize).astype("<i8").tobytes())
            total = int(ends[-1])
        for start in range(0, lengths.size + 1, _CHECK_CHUNK):
            stop = min(start + _CHECK_CHUNK, lengths.size + 1)
            stream.write(np.arange(start, stop, dtype="<i8").tobytes())
        _sync_and_close(stream)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stream.close()


def _sync_and_close(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _damage_error(path: Path, problem: str) -> UserError:
    valid = "copy both files again, or delete the folder and make the corpus again"
    return UserError(f"corpus: {str(path)!r} is {problem}; {valid}")


def _map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory, uint8. UserError if there is none."""
    try:
        with open_regular(path) as file:
            return np.memmap(file, mode="r") if os.fstat(file.fileno()).st_size else np.empty(0, np.uint8)
    except OSError as error:
        missing = "is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
        raise UserError(
            f"corpus: {str(path)!r} {missing}; needed: a Megatron .bin file and its .idx"
        ) from None


class IndexedTokens:
    """Memory-mapped reader of one ``.bin/.idx`` pair, seen as one stream of ``num_tokens`` tokens.

    The whole index is checked when it is opened, in about 15 ns a document. The tokens are not read.

    Raises UserError if a file is missing, the .idx is not an index or is damaged, or the two do not belong
    together.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index_file, token_file = idx_path(prefix), bin_path(prefix)
        raw, data = _map_file(index_file), _map_file(token_file)
        if raw.size < HEADER.size or bytes(raw[: len(MAGIC)]) != MAGIC:
            raise _damage_error(index_file, "not a Megatron index (it must start with MMIDIDX)")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(bytes(raw[: HEADER.size]))
        if version != 1 or code not in DTYPE_OF_CODE:
            raise UserError(
                f"corpus: {str(index_file)!r} has version {version} and dtype code {code}; "
                f"valid: version 1 and an integer code of {sorted(DTYPE_OF_CODE)}"
            )
        offsets, boundaries = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
        expected = boundaries + 8 * num_boundaries
        # A multimodal index has one more byte a sequence at its end; its tokens read the same.
        if raw.size not in (expected, expected + num_sequences):
            raise _damage_error(
                index_file,
                f"truncated or damaged: it has {raw.size} bytes, but its header announces {expected}",
            )
        self.dtype = np.dtype(DTYPE_OF_CODE[code])
        self.lengths = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        """Tokens of each sequence [S], int32; a sequence is a document unless the tool split sentences."""
        self._offsets = np.frombuffer(raw, "<i8", num_sequences, offsets)
        self.boundaries = np.frombuffer(raw, "<i8", num_boundaries, boundaries)
        """Sequence index at which each document begins, and S [documents + 1], int64."""
        self.num_documents = max(0, num_boundaries - 1)
        self._check_index(index_file)
        last = (int(self._offsets[-1]), int(self.lengths[-1])) if num_sequences else (0, 0)
        self.num_tokens = last[0] // self.dtype.itemsize + last[1]
        size = data.size
        if size != self.num_tokens * self.dtype.itemsize:
            kind = (
                "truncated" if size < self.num_tokens * self.dtype.itemsize else "longer than its index says"
            )
            raise _damage_error(
                token_file,
                f"{kind} (or the .idx is another corpus's): {size} bytes, but the index announces "
                f"{self.num_tokens} tokens of {self.dtype.itemsize} bytes",
            )
        self._tokens = data.view(self.dtype)

    def _check_index(self, index_file: Path) -> None:
        """Check that the documents lie one after the other and cover the sequences from 0 to S, and that the
        sequences lie back to back (so that the file is one stream)."""
        boundaries, total = self.boundaries, 0
        if not boundaries.size or boundaries[0] != 0 or boundaries[-1] != self.lengths.size:
            raise _damage_error(index_file, "damaged: its documents do not cover its sequences")
        for start in range(0, boundaries.size, _CHECK_CHUNK):
            # Ascending from 0 to S, so none is out of range. Compared, not subtracted: a difference may
            # overflow.
            chunk = boundaries[start : start + _CHECK_CHUNK + 1]
            if (chunk[1:] < chunk[:-1]).any():
                raise _damage_error(index_file, "damaged: its documents are not in order")
        for start in range(0, self.lengths.size, _CHECK_CHUNK):
            lengths = self.lengths[start : start + _CHECK_CHUNK].astype(np.int64)
            ends = np.cumsum(lengths) + total
            offsets = self._offsets[start : start + _CHECK_CHUNK]
            if lengths.min() < 0 or not np.array_equal(offsets, (ends - lengths) * self.dtype.itemsize):
                raise _damage_error(index_file, "damaged: its sequences do not lie back to back")
            total = int(ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens ``start … start + count - 1`` of the stream, int64 [count]."""
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens {start}..{start + count} of a stream of {self.num_tokens}")
        return np.asarray(self._tokens[start : start + count], dtype=np.int64)

    def check_vocabulary(self, tokens: np.ndarray, vocab_size: int) -> None:
        """Raise UserError if *tokens*, read from this stream, has ids outside 0 … vocab_size - 1."""
        lowest, highest = int(tokens.min(initial=0)), int(tokens.max(initial=0))
        if lowest < 0 or highest >= vocab_size:
            raise UserError(
                f"corpus: {self.prefix!r} has token {lowest if lowest < 0 else highest}, which its tokenizer "
                f"does not have; valid: 0..{vocab_size - 1}"
            )

    def start_of(self, index: int) -> int:
        """Position in the stream at which document *index* begins, or the one before it ends."""
        return int(self._starts(self.boundaries[index : index + 1])[0])

    def ends_of(self, first: int, last: int) -> np.ndarray:
        """Positions in the stream after the documents ``first … last - 1``, int64 [last - first]."""
        return self._starts(self.boundaries[first + 1 : last + 1])

    def _starts(self, sequences: np.ndarray) -> np.ndarray:
        """Positions at which these sequences begin, int64; of S, the end of the stream."""
        starts = np.full(sequences.size, self.num_tokens, np.int64)
        inside = sequences < self.lengths.size
        starts[inside] = self._offsets[sequences[inside]] // self.dtype.itemsize
        return starts

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Where documents begin among tokens ``start … start + count - 1``: distances from *start*, int64,
        ascending.

        The first is 0: the rest of a document that began earlier counts as a document. Positions come from
        the index, not from the tokens: Megatron's tools need not have appended an end-of-document token, and
        a text that spells one is still one document. Costs two binary searches, whatever the size of the
        corpus.
        """
        size = self.dtype.itemsize
        # Of the sequences that begin after *start*, in the range. Not numpy's search, which first copies an
        # array that is not aligned, as those of the index are.
        first, last = (bisect_left(self._offsets, each * size) for each in (start + 1, start + count))
        begin, end = (bisect_left(self.boundaries, each) for each in (first, last))
        sequences = self.boundaries[begin:end]
        # Empty documents begin where the next does.
        return np.unique(np.concatenate([np.zeros(1, np.int64), self._starts(sequences) - start]))

    def document(self, index: int) -> np.ndarray:
        """All tokens of document *index*, int64."""
        start = self.start_of(index)
        return self.read(start, self.start_of(index + 1) - start)

    def slice(self, first: int, last: int) -> IndexedTokens:
        """Documents ``first … last - 1`` as a separate stream."""
        sequences = slice(int(self.boundaries[first]), int(self.boundaries[last]))
        start, stop = self.start_of(first), self.start_of(last)
        part = copy.copy(self)
        part.lengths = self.lengths[sequences]
        part.num_tokens = stop - start
        part.num_documents = last - first
        part.boundaries, part._offsets = self.boundaries[first : last + 1], self._offsets[sequences]
        # A part from the beginning needs no copy of the index, which every rank would hold in memory.
        if sequences.start:
            part.boundaries = part.boundaries - sequences.start
            part._offsets = part._offsets - start * self.dtype.itemsize
        part._tokens = self._tokens[start:stop]
        return part

    def counts(self, vocab_size: int, most: int | None = None, chunk: int = 1 << 22) -> np.ndarray:
        """How often each token occurs, int64 [vocab_size]. Raises UserError for ids beyond the vocabulary.

        Args:
            most: read about this many tokens at most, in chunks spread evenly over the stream; None reads all
                of it.
            chunk: tokens that are read at once.
        """
        total = np.zeros(vocab_size, np.int64)
        step = 1 if most is None else max(1, -(-self.num_tokens // most))
        for start in range(0, self.num_tokens, chunk * step):
            tokens = self._tokens[start : start + chunk]
            self.check_vocabulary(tokens, vocab_size)
            total += np.bincount(tokens, minlength=vocab_size)
        return total
