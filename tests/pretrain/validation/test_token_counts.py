"""Shares of tokens: those of the training split, or of a part that is spread evenly over it."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np

from pretrain.data.indexed import IndexedTokens
from pretrain.run.data import RunData
from pretrain.validation.loss import compare_baselines, token_shares


def test_they_are_those_of_the_training_tokens(small):
    counter = Counter(small.training.read(0, small.training.num_tokens).tolist())
    counts = np.array([counter[token] + 1 for token in range(small.tokenizer.vocab_size)])
    found = token_shares(small)
    assert np.array_equal(found.shares, counts / counts.sum())
    assert found.counted == found.total == small.training.num_tokens


def test_a_sample_is_said_to_be_one(small, monkeypatch):
    counts = IndexedTokens.counts
    monkeypatch.setattr(
        IndexedTokens, "counts", lambda *arguments, **rest: counts(*arguments, chunk=1000, **rest)
    )
    sampled = token_shares(small, small.training.num_tokens // 3)
    assert 0.2 * sampled.total < sampled.counted < 0.4 * sampled.total
    whole = compare_baselines(RunData([(small, Fraction(1))]), 32, 5)
    assert str(whole).endswith(f"zlib -9 {whole.zlib:.4f}")
    monkeypatch.setattr(token_shares, "__defaults__", (1000,))
    part = compare_baselines(RunData([(small, Fraction(1))]), 32, 5)
    assert str(part).endswith(
        f"(frequencies of 1,000 of {small.training.num_tokens:,} training tokens, evenly spread)"
    )
