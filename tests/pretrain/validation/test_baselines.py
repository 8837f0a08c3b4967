"""The baselines of a run against counting by hand."""

import math
import zlib
from collections import Counter
from fractions import Fraction

import pytest

from pretrain.data.corpus import Corpus
from pretrain.run.data import RunData
from pretrain.validation.loss import compare_baselines


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
