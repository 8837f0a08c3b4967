"""Signed ranks against enumeration, scipy and the published tables; outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pretrain.study.statistics.ranks import find_outliers, robust_sd, signed_rank

EIGHT = [0.030, 0.024, -0.002, 0.073, 0.049, 0.017, 0.023, 0.254]
"""Descending less ascending of eight seeds, of which one is an outlier."""


def test_estimate_interval_and_test_of_eight_pairs():
    found = signed_rank(EIGHT)
    averages = sorted((EIGHT[i] + EIGHT[j]) / 2 for i in range(8) for j in range(i, 8))
    assert found.estimate == pytest.approx((averages[17] + averages[18]) / 2)
    # Hollander and Wolfe, table A.4: of eight pairs the interval at 96.1 % is from the 4th to the 33rd.
    assert (found.low, found.high) == pytest.approx((averages[3], averages[32]))
    assert found.level == pytest.approx(1 - 2 * 5 / 256)
    assert found.p == pytest.approx(4 / 256)


@pytest.mark.parametrize("count", [2, 5, 6, 9, 12])
def test_the_interval_holds_what_the_test_does_not_refuse(count):
    values = np.random.default_rng(count).normal(0.3, 1, count)
    found = signed_rank(list(values))
    for shift in (found.low, found.high):
        inside = shift + (1e-9 if shift == found.low else -1e-9)
        assert stats.wilcoxon(values - inside).pvalue >= 1 - found.level
    for outside in (found.low - 1e-9, found.high + 1e-9):
        assert stats.wilcoxon(values - outside).pvalue <= 1 - found.level + 1e-12


def test_few_pairs_zeros_and_ties():
    assert signed_rank([1.0, 2.0, 3.0]).level == 0.75
    assert signed_rank([0.0, 0.0, 0.0]).p == 1.0
    tied = signed_rank([1.0, 1.0, -1.0, 0.0, 2.0])
    assert 0 < tied.p <= 1


def test_robust_sd_is_that_of_normal_groups():
    groups = np.random.default_rng(1).normal(scale=0.3, size=(400, 8))
    assert robust_sd(list(groups)) == pytest.approx(0.3, rel=0.05)
    assert robust_sd(list(np.random.default_rng(2).normal(scale=0.3, size=(1500, 3)))) == pytest.approx(
        0.3, rel=0.15
    )
    assert math.isnan(robust_sd([[1.0], []]))


def test_outliers():
    generator = np.random.default_rng(5)
    values = {name: dict(enumerate(4 + generator.normal(scale=0.02, size=8))) for name in "abc"}
    assert find_outliers(values) == []
    values["b"][3] = 4.25
    values["c"][1] = math.nan
    values["a"][0] = 3.7  # far better
    assert find_outliers(values) == [("b", 3), ("c", 1)]
    assert find_outliers(values, higher_is_better=True) == [("a", 0), ("c", 1)]
    assert find_outliers({"a": {1: 4.0}}) == []


@pytest.mark.parametrize("step", [0.01, 1.0])
def test_ties_do_not_make_the_next_value_an_outlier(step):
    """A measure of few values, such as an accuracy on few examples; a run far beyond its steps is named."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        rare = 90 + generator.choice([0, 0, 0, 0, 0, 0, 0, -1, 1], size=(3, 6))
        values = {name: dict(enumerate((step * row).tolist())) for name, row in zip("abc", rare, strict=True)}
        assert find_outliers(values, higher_is_better=True) == []
        values["b"] |= {6: 90 * step, 7: 91 * step, 8: 89 * step, 9: 60 * step}
        assert find_outliers(values, higher_is_better=True) == [("b", 9)]
    assert find_outliers({"a": dict.fromkeys(range(5), 0.98) | {5: 0.97}}, higher_is_better=True) == []
    assert find_outliers({"a": dict.fromkeys(range(5), 0.98)}) == []
