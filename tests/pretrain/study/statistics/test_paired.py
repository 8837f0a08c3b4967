"""Intervals and power against independent computations and drawn values; outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pretrain.study.statistics.paired import (
    MOST_PAIRS,
    detectable_effect,
    find_outliers,
    paired_interval,
    paired_power,
    pairs_needed,
    pooled_sd,
    robust_sd,
)

DIFFERENCES = [0.021, -0.004, 0.013, 0.030, 0.002]


# ---------------------------------------------------------------------- intervals


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_interval_is_that_of_scipy(confidence):
    zeros = np.zeros(len(DIFFERENCES))
    expected = stats.ttest_rel(DIFFERENCES, zeros).confidence_interval(confidence)
    found = paired_interval(DIFFERENCES, confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.value == pytest.approx(np.mean(DIFFERENCES))
    assert found.p == pytest.approx(stats.ttest_1samp(DIFFERENCES, 0).pvalue)
    assert [paired_interval([each] * 3).p for each in (0.0, 0.5)] == [1.0, 0.0]


@pytest.mark.parametrize("power", [0.8, 0.95])
@pytest.mark.parametrize("effect", [0.3, 0.7, 1.5, 2.5])
def test_pairs_are_the_first_that_suffice(effect, power):
    def found(n):  # the formula, written out
        t = stats.t.isf(0.025, n - 1)
        return 1 - stats.nct.cdf(t, n - 1, effect * n**0.5) + stats.nct.cdf(-t, n - 1, effect * n**0.5)

    expected = next(n for n in range(2, 1000) if found(n) >= power)
    assert pairs_needed(effect, 1.0, power) == pairs_needed(-effect / 50, 1 / 50, power) == expected


@pytest.mark.parametrize("pairs", [2, 3, 34, 5000])
def test_power_far_out_is_a_number(pairs):
    """The noncentral t of scipy, and with it statsmodels' power, is NaN at some of these."""
    found = [paired_power(effect, 1.0, pairs) for effect in np.geomspace(0.1, 1e12, 200)]
    assert found == sorted(found) and found[-1] == pytest.approx(1.0)


def test_pairs_at_the_ends():
    assert pairs_needed(100.0, 1.0) == 2 and pairs_needed(1.0, 0.0) == 2
    assert pairs_needed(0.01, 1.0) == pytest.approx(78_491, abs=2) and MOST_PAIRS == 100_000
    assert pairs_needed(0.008, 1.0) is None and pairs_needed(0.0, 1.0) is None
    assert pairs_needed(math.nan, 1.0) is None and pairs_needed(1.0, math.nan) is None


@pytest.mark.parametrize("pairs", [2, 3, 6, 34, 2000])
@pytest.mark.parametrize("power", [0.5, 0.8])
def test_the_detectable_effect_needs_so_many_pairs(pairs, power):
    effect = detectable_effect(0.013, pairs, power)
    assert pairs_needed(effect * (1 + 1e-9), 0.013, power) == pairs
    assert pairs_needed(effect * (1 - 1e-6), 0.013, power) == pairs + 1


def test_pooled_by_hand():
    assert pooled_sd([[1, 3], [10, 11, 12], [7], []]) == pytest.approx(((2 + 2) / 3) ** 0.5)
    assert math.isnan(pooled_sd([[1.0], []])) and math.isnan(pooled_sd([]))


def test_robust_sd_is_that_of_normal_groups():
    groups = np.random.default_rng(1).normal(scale=0.3, size=(400, 8))
    assert robust_sd(list(groups)) == pytest.approx(0.3, rel=0.05)
    assert robust_sd(list(groups[:, :3])) == pytest.approx(0.3, rel=0.15)


def test_robust_sd_of_normal_quantiles():
    values = stats.norm.ppf((np.arange(300) + 0.5) / 300, scale=0.3)
    assert robust_sd([values.tolist()]) == pytest.approx(0.3, rel=0.01)


def test_outliers():
    generator = np.random.default_rng(5)
    values = {name: dict(enumerate(4 + generator.normal(scale=0.02, size=8))) for name in "abc"}
    assert find_outliers(values) == find_outliers({"a": {1: 4.0}}) == []
    values["b"][3] = 4.25
    values["c"][1] = math.nan
    values["a"][0] = 3.7  # far better
    assert find_outliers(values) == [("b", 3), ("c", 1)]
    assert find_outliers(values, higher_is_better=True) == [("a", 0), ("c", 1)]


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
