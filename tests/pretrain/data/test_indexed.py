"""Corpus files against megatron-core's own reader and builder, and damaged files."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    bin_path,
    idx_path,
    token_dtype,
)
from tests.helpers.corpora import write_documents, write_pair


def misalign(values):
    """As they lie in the mapped index."""
    raw = np.zeros(values.nbytes + 2, np.uint8)[2:]
    raw[:] = values.view(np.uint8)
    return raw.view(values.dtype)


def test_document_starts_do_not_read_the_whole_index(tmp_path):
    """Numpy's search would copy it, for each window."""
    write(tmp_path / "a")
    stream = IndexedTokens(tmp_path / "a")
    count = 3_000_000
    stream.num_tokens = stream.num_documents = count
    stream.lengths = np.ones(count, np.int32)
    stream.boundaries = misalign(np.arange(count + 1))
    stream._offsets = misalign(np.arange(count) * stream.dtype.itemsize)
    began = time.process_time()
    for start in range(0, count - 50, count // 100):
        assert stream.document_starts(start, 50).tolist() == [*range(50)]
    assert time.process_time() - began < 1


DOCUMENTS = [[1, 2, 3], [65499], [], [7] * 1000, [0, 5]]


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    return write_documents(prefix, documents, dtype)


def build_with_megatron(megatron, prefix, documents, dtype):
    import torch

    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(idx_path(prefix)))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_are_those_of_megatrons_builder(megatron, tmp_path, dtype):
    build_with_megatron(megatron, tmp_path / "theirs", DOCUMENTS, dtype)
    write(tmp_path / "ours", dtype=dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatrons_corpora_read_back_identically(megatron, tmp_path, dtype):
    build_with_megatron(megatron, tmp_path / "corpus", DOCUMENTS, dtype)
    tokens = IndexedTokens(tmp_path / "corpus")
    assert tokens.dtype == dtype and tokens.num_documents == len(DOCUMENTS)
    for index, document in enumerate(DOCUMENTS):
        assert tokens.document(index).tolist() == document
    stream = [token for document in DOCUMENTS for token in document]
    assert tokens.read(0, tokens.num_tokens).tolist() == stream


def test_dtype_is_the_one_megatron_chooses(megatron):
    for size in (256, 50257, 65499, 65500, 65536, 128256):
        assert token_dtype(size) == megatron.DType.optimal_dtype(size)


def test_empty_corpus(tmp_path):
    tokens = IndexedTokens(write(tmp_path / "empty", []))
    assert (tokens.num_tokens, tokens.num_documents) == (0, 0)


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    for token in (65536, -1):
        with pytest.raises(UserError, match="does not fit uint16"):
            write(tmp_path / "corpus", [[1, token]])


def test_interrupted_writer_leaves_no_index(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document([1])
        raise RuntimeError
    with pytest.raises(UserError, match=r"corpus\.idx' is missing"):
        IndexedTokens(tmp_path / "corpus")


@pytest.mark.parametrize("change", [-(10**6), -2, -1, 1, 2])
def test_token_files_of_another_size_are_refused(tmp_path, change):
    path = bin_path(write(tmp_path / "corpus"))
    path.write_bytes((path.read_bytes() + bytes(2))[: max(0, path.stat().st_size + change)])
    message = "is truncated" if change < 0 else "is longer than its index says"
    with pytest.raises(UserError, match=rf"corpus\.bin' {message}"):
        IndexedTokens(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "dtype code 6"),
        (17, b"\x63", "dtype code 99"),
        (18, struct.pack("<Q", 2**60), "truncated or damaged"),
        (34, struct.pack("<i", 4), "back to back"),
        (34, struct.pack("<ii", -1, 5), "back to back"),
        (34 + 4 * 5 + 8, struct.pack("<q", 100), "back to back"),
    ],
)
def test_damaged_index_is_refused(tmp_path, offset, value, message):
    path = idx_path(write(tmp_path / "corpus"))
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=message):
        IndexedTokens(tmp_path / "corpus")


def test_reading_beyond_the_end_is_an_error(tmp_path):
    tokens = IndexedTokens(write(tmp_path / "corpus"))
    for start, count in ((-1, 1), (0, tokens.num_tokens + 1), (tokens.num_tokens, 1)):
        with pytest.raises(IndexError):
            tokens.read(start, count)


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=12),
    dtype=st.sampled_from([np.uint16, np.int32]),
    data=st.data(),
)
def test_document_starts_against_a_plain_loop(tmp_path_factory, documents, dtype, data):
    """Documents of several sequences (Megatron splits sentences on request), empty ones, parts of
    a stream."""
    prefix = tmp_path_factory.mktemp("starts") / "c"
    write_pair(prefix, documents, dtype)
    first = data.draw(st.integers(0, len(documents)))
    stream = IndexedTokens(prefix).slice(first, len(documents))
    begins, total = set(), 0
    for sentences in documents[first:]:
        begins.add(total)
        total += sum(sentences)
    for start in range(total):
        for count in {1, 2, total - start}:
            if start + count <= total:
                expected = [0, *(n - start for n in sorted(begins) if start < n < start + count)]
                assert stream.document_starts(start, count).tolist() == expected
