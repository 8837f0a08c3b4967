"""Corpora of Megatron's tools as they are, and checks of whole corpora."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.assembly.data import open_data
from pretrain.config.run_config import RunConfig
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.sequences import TrainingSequences
from pretrain.validation.loss import token_shares
from tests.helpers.corpora import write_documents


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_pair_of_megatrons_builder_is_data(small, tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = [small.training.document(index) for index in range(small.training.num_documents)]
    prefix = tmp_path / "mine_text_document"
    builder = megatron.IndexedDatasetBuilder(str(bin_path(prefix)), dtype=dtype)
    for document in documents:
        builder.add_document(document, [document.size])
    builder.finalize(str(idx_path(prefix)))
    corpus = Corpus.open(prefix, small.tokenizer)
    assert corpus.name == "mine_text_document" and corpus.training.dtype == dtype
    read = [
        stream.document(i)
        for stream in (corpus.training, corpus.validation)
        for i in range(stream.num_documents)
    ]
    assert len(read) == len(documents)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(read, documents, strict=True))
    assert corpus.validation.num_tokens >= 0.05 * small.training.num_tokens
    assert TrainingSequences([(corpus, 1)], 32, 0).batch(0, 4).shape == (4, 33)
    assert token_shares(corpus).shares.sum() == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=2, max_size=30))
def test_the_last_documents_are_held_out(tmp_path_factory, small, lengths):
    total = sum(lengths)
    tokens = iter(range(total))
    documents = [[next(tokens) % 500 for _ in range(length)] for length in lengths]
    corpus = Corpus.open(
        write_documents(tmp_path_factory.mktemp("pair") / "pair", documents), small.tokenizer
    )
    training, validation = corpus.training, corpus.validation
    assert training.num_documents + validation.num_documents == len(lengths)
    assert training.num_documents and validation.num_documents
    for stream, expected in (
        (training, documents[: training.num_documents]),
        (validation, documents[training.num_documents :]),
    ):
        assert [stream.document(index).tolist() for index in range(stream.num_documents)] == expected
        assert stream.read(0, stream.num_tokens).tolist() == [
            token for document in expected for token in document
        ]
        with pytest.raises(IndexError):
            stream.read(0, stream.num_tokens + 1)
    # At least 5 %, unless that would leave nothing to train on; and no document more than needed.
    if training.num_documents > 1:
        assert validation.num_tokens >= 0.05 * total - 1e-9
    assert validation.num_tokens - lengths[training.num_documents] <= 0.05 * total


def test_bad_pairs_are_refused(small, tmp_path):
    prefix = write_documents(tmp_path / "pair", [[1, 2], [3, 4], [5]])
    with pytest.raises(
        UserError, match=r"is a \.bin/\.idx pair, which does not say its tokenizer; give --tokenizer"
    ):
        Corpus.open(prefix)
    with pytest.raises(UserError, match="has 1 documents; needed: at least two"):
        Corpus.open(write_documents(tmp_path / "one", [[1, 2]]), small.tokenizer)
    bin_path(prefix).unlink()
    with pytest.raises(UserError, match=r"pair\.bin' is missing"):
        Corpus.open(prefix, small.tokenizer)


def test_a_run_opens_pairs_folders_and_blends_of_them(small, small_folder, tmp_path, gpt2_folder):
    documents = [small.training.document(index).tolist() for index in range(10)]
    prefix = write_documents(tmp_path / "pair", documents)
    folder = str(small_folder / "tokenizer")
    data = open_data(RunConfig(data=f"{prefix}:1/4,{small_folder}:3/4", tokenizer=folder), lambda _: None)
    assert [weight for _, weight in data.corpora] == [Fraction(1, 4), Fraction(3, 4)]
    assert data.tokenizer.vocab_size == small.tokenizer.vocab_size
    data.training_sequences(64, 0).batch(0, 8)
    assert data.identity().data[0] != data.identity().data[1]
    with pytest.raises(UserError, match="give --tokenizer"):
        open_data(RunConfig(data=str(prefix)), lambda _: None)
    with pytest.raises(UserError, match=r"was made with sentencepiece-600, and not with gpt2"):
        open_data(RunConfig(data=str(small_folder), tokenizer=str(gpt2_folder)), lambda _: None)
    with pytest.raises(UserError, match="the built-in corpus has its own"):
        open_data(RunConfig(tokenizer=folder), lambda _: None)


def test_slices_of_documents_that_are_several_sequences(tmp_path):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    for start in range(4):
        builder.add_document(np.arange(start * 5, start * 5 + 5), [2, 3])
    builder.finalize(str(tmp_path / "c.idx"))
    part = IndexedTokens(tmp_path / "c").slice(1, 3)
    assert [part.document(index).tolist() for index in range(2)] == [list(range(5, 10)), list(range(10, 15))]
    assert part.read(0, 10).tolist() == list(range(5, 15)) and part.ends_of(0, 2).tolist() == [5, 10]
