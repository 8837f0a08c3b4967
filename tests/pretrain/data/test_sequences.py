"""Training order and validation windows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from tests.helpers.corpora import write_documents


def numbered_corpus(folder: Path, training: int, validation: int = 100, name: str = "numbered") -> Corpus:
    """A corpus whose training token number i is i, cut into documents of 7 tokens."""
    folder = folder / name
    folder.mkdir(parents=True)
    for split, count in (("training", training), ("validation", validation)):
        documents = [range(start, min(start + 7, count)) for start in range(0, count, 7)]
        write_documents(folder / split, documents, np.int32)
    tokenizer: Any = SimpleNamespace(
        vocab_size=10**6,
        name="numbers",
        end_of_document=0,
        token_bytes=lambda: np.arange(10**6, dtype=np.int64) % 5,
        content_hash=lambda: "numbers",
    )
    meta: Any = None
    return Corpus(
        folder, meta, tokenizer, IndexedTokens(folder / "training"), IndexedTokens(folder / "validation")
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 700),
    context_length=st.integers(1, 40),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_every_token_is_a_label_once_an_epoch(tmp_path_factory, tokens, context_length, seed, epoch):
    if tokens <= context_length:
        return
    corpus = numbered_corpus(tmp_path_factory.mktemp("corpus"), tokens)
    sequences = TrainingSequences([(corpus, 1)], context_length, seed)
    windows = sequences.windows[0]
    batch = sequences.batch(epoch * windows, windows)
    assert batch.shape == (windows, context_length + 1) and batch.dtype == np.int64
    np.testing.assert_array_equal(batch[:, 1:], batch[:, :1] + np.arange(1, context_length + 1))
    labels = np.sort(batch[:, 1:].reshape(-1))
    dropped = (tokens - 1) % context_length
    np.testing.assert_array_equal(labels, np.arange(1, tokens - dropped))


def test_epochs_and_seeds_have_their_own_order(tmp_path):
    corpus = numbered_corpus(tmp_path, 5000)
    windows = TrainingSequences([(corpus, 1)], 10, 0).windows[0]
    orders = [
        tuple(TrainingSequences([(corpus, 1)], 10, seed).batch(epoch * windows, windows)[:, 0])
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_sequences_do_not_depend_on_batches_ranks_or_restarts(small):
    expected = TrainingSequences([(small, 1)], 32, 3).batch(0, 64)
    for ranks in (1, 2, 4):
        for micro_batch in (1, 2, 4):
            rows = []
            for first in range(0, 64, ranks * micro_batch):
                for rank in range(ranks):  # as a rank of a fresh process would ask
                    fresh = TrainingSequences([(small, 1)], 32, 3)
                    rows.append(fresh.batch(first + rank * micro_batch, micro_batch))
            np.testing.assert_array_equal(np.concatenate(rows), expected)


def test_the_order_never_changes(tmp_path):
    """Resumed and repeated runs rely on these values."""
    sequences = TrainingSequences([(numbered_corpus(tmp_path, 5000), 1)], 10, 0)
    assert sequences.batch(0, 6)[:, 0].tolist() == [460, 3770, 1560, 1570, 630, 3910]
    assert sequences.batch(10**9, 2)[:, 0].tolist() == [2930, 3930]


def test_blends_take_each_corpus_in_its_own_order(tmp_path):
    one, two = (numbered_corpus(tmp_path, size, name=str(size)) for size in (400, 3000))
    blend = TrainingSequences([(one, 0.25), (two, 0.75)], 10, 0)
    places = [blend.locate(number) for number in range(4000)]
    assert Counter(index for index, _, _ in places) == {0: 1000, 1: 3000}
    for index, windows in enumerate(blend.windows):
        of_corpus = [(epoch, window) for corpus, epoch, window in places if corpus == index]
        for epoch in range(len(of_corpus) // windows):
            seen = of_corpus[epoch * windows : (epoch + 1) * windows]
            assert {number for number, _ in seen} == {epoch}
            assert sorted(window for _, window in seen) == list(range(windows))
    assert blend.windows == [39, 299]
    assert "25.0% of the blend" in blend.describe() and "3,000 tokens, 299 windows of 10" in blend.describe()


def test_documents_of_a_batch_are_those_of_its_windows(tmp_path):
    """Documents have 7 tokens, so token number i begins one where 7 divides i; windows cross them.
    Blended."""
    one, two = (numbered_corpus(tmp_path, size, name=str(size)) for size in (400, 3000))
    sequences = TrainingSequences([(one, 0.25), (two, 0.75)], 10, 0)
    batch = sequences.batch(40, 8)
    begins = batch[:, :-1] % 7 == 0
    begins[:, 0] = True  # what is left of a document counts as one
    expected = [*np.flatnonzero(begins), 80]
    offsets = sequences.document_offsets(40, 8)
    assert offsets.dtype == np.int32 and offsets.tolist() == expected
    validation = ValidationSequences(one, 10, 3)
    for window, starts in zip(validation.batch(0, 3), validation.document_starts(), strict=True):
        assert starts.tolist() == [i for i in range(10) if i == 0 or window[i] % 7 == 0]


def test_bad_training_corpora_are_refused(tmp_path, small):
    corpus = numbered_corpus(tmp_path, 20)
    assert TrainingSequences([(corpus, 1)], 19, 0).windows == [1]
    with pytest.raises(UserError, match=r"20 tokens, fewer than one window of 21; .* at most 19"):
        TrainingSequences([(corpus, 1)], 20, 0)
    with pytest.raises(UserError, match="valid: corpora of one tokenizer"):
        TrainingSequences([(corpus, 1), (small, 1)], 8, 0)
    with pytest.raises(UserError, match="positive"):
        TrainingSequences([], 8, 0)
    with pytest.raises(IndexError):
        TrainingSequences([(corpus, 1)], 8, 0).sequence(-1)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    corpus = numbered_corpus(tmp_path, 50)
    corpus.tokenizer.vocab_size = 40
    with pytest.raises(UserError, match=r"has token 4\d, which its tokenizer does not have; valid: 0..39"):
        TrainingSequences([(corpus, 1)], 10, 0).batch(0, 4)
    with pytest.raises(UserError, match="has token 49"):
        corpus.training.counts(40)


def test_counts_of_a_part_are_spread_over_the_whole(tmp_path):
    stream = numbered_corpus(tmp_path, 50).training
    tokens = np.concatenate([stream.document(i) for i in range(stream.num_documents)])
    assert np.array_equal(stream.counts(50), np.bincount(tokens, minlength=50))
    assert np.array_equal(stream.counts(50, most=len(tokens), chunk=7), stream.counts(50))
    part = stream.counts(50, most=20, chunk=5)  # every so many chunks of 5, the first among them
    step = -(-len(tokens) // 20)
    chosen = np.concatenate([tokens[start : start + 5] for start in range(0, len(tokens), 5 * step)])
    assert step > 1 and part.sum() <= 25 and np.array_equal(part, np.bincount(chosen, minlength=50))


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2, 500), context_length=st.integers(1, 30), count=st.none() | st.integers(1, 60))
def test_validation_windows_are_spread_and_share_no_label(tmp_path_factory, tokens, context_length, count):
    if tokens <= context_length:
        return
    corpus = numbered_corpus(tmp_path_factory.mktemp("corpus"), 10, tokens)
    validation = ValidationSequences(corpus, context_length, count)
    available = (tokens - 1) // context_length
    assert len(validation) == (available if count is None else min(count, available))
    batch = validation.batch(0, len(validation))
    labels = batch[:, 1:].reshape(-1)
    assert len(set(labels.tolist())) == labels.size
    starts = batch[:, 0] // context_length
    gaps = np.diff([*starts, available])
    assert starts[0] == 0 and gaps.max() - gaps.min() <= 1
    assert validation.label_bytes() == int((labels % 5).sum())


def test_label_bytes_are_those_of_the_decoded_text(small):
    validation = ValidationSequences(small, 16, None)
    pieces = [validation.batch(number, 1)[0, 1:] for number in range(len(validation))]
    text = small.tokenizer.decode(np.concatenate(pieces))
    assert validation.label_bytes() == len(text.encode())


def test_validation_errors(tmp_path, small):
    with pytest.raises(UserError, match=r"validation has 5 tokens, fewer than one window of 6"):
        ValidationSequences(numbered_corpus(tmp_path, 100, 5), 5, 1)
    with pytest.raises(IndexError):
        ValidationSequences(small, 16, 4).batch(3, 2)
