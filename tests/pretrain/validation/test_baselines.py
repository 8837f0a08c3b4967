"""The baselines of a run against counting by hand."""

import dataclasses
import math
import zlib
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from pretrain.data.corpus import Corpus
from pretrain.run.data import RunData
from pretrain.validation.loss import compare_baselines, token_shares


def test_both_are_of_the_windows_that_the_model_is_validated_on(small):
    found = compare_baselines(RunData([(small, Fraction(1))]), 32, 5)
    T, available = 32, (small.validation.num_tokens - 1) // 32
    windows = [number * available // 5 for number in range(5)]
    labels = [small.validation.read(w * T + 1, T).tolist() for w in windows]
    training = Counter(small.training.read(0, small.training.num_tokens).tolist())
    total = small.training.num_tokens + small.tokenizer.vocab_size
    nats = sum(-math.log((training[token] + 1) / total) for window in labels for token in window)
    texts = [small.tokenizer.decode(window).encode() for window in labels]
    sizes = small.tokenizer.token_bytes()
    label_bytes = sum(int(sizes[token]) for window in labels for token in window)
    assert found.token_frequency == pytest.approx(nats / math.log(2) / label_bytes, rel=1e-12)
    assert found.zlib == 8 * len(zlib.compress(b"".join(texts), 9)) / label_bytes
    assert f"{found.zlib:.4f}" in str(found)


def test_a_blend_shares_the_windows_by_weight(small, small_folder):
    blend = RunData([(small, Fraction(3, 4)), (Corpus.open(small_folder), Fraction(1, 4))])
    once = RunData([(small, Fraction(1))])
    expected = total_bytes = 0.0
    for count in (3, 1):  # the same corpus twice: three windows of the one, one of the other
        label_bytes = once.validation_bytes(32, count)
        expected += compare_baselines(once, 32, count).token_frequency * label_bytes
        total_bytes += label_bytes
    assert compare_baselines(blend, 32, 4).token_frequency == pytest.approx(expected / total_bytes, rel=1e-12)


def test_frequencies_of_a_blend_are_weighted(small):
    other = dataclasses.replace(small, training=small.validation)
    data = RunData([(small, Fraction(3, 4)), (other, Fraction(1, 4))])
    shares = 0.75 * token_shares(small).shares + 0.25 * token_shares(other).shares
    labels = data.validation_windows(32, 4)[:, 1:].astype(np.int64)
    expected = -np.log2(shares)[labels].sum() / data.validation_bytes(32, 4)
    assert compare_baselines(data, 32, 4).token_frequency == pytest.approx(expected, rel=1e-9)
