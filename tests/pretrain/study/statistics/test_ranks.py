"""Signed ranks against enumeration, scipy and the published tables; runs that fell behind."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from pretrain.study.statistics.ranks import (
    find_behind,
    robust_sd,
    signed_rank,
    signed_rank_pairs,
    signed_rank_power,
    smallest_p,
)

EIGHT = [0.030, 0.024, -0.002, 0.073, 0.049, 0.017, 0.023, 0.254]
"""Descending less ascending of eight seeds, of which one fell behind."""


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


def test_the_level_is_that_of_all_signs():
    values = np.random.default_rng(0).normal(size=7)
    found = signed_rank(list(values))
    hits = 0
    for signs in itertools.product((-1, 1), repeat=7):
        flipped = signed_rank(list(np.abs(values) * signs))
        hits += flipped.low <= 0 <= flipped.high
    assert hits / 2**7 == pytest.approx(found.level)


def test_few_pairs_zeros_and_ties():
    assert signed_rank([1.0, 2.0, 3.0]).level == 0.75
    assert signed_rank([0.0, 0.0, 0.0]).p == 1.0
    tied = signed_rank([1.0, 1.0, -1.0, 0.0, 2.0])
    assert 0 < tied.p <= 1


def test_smallest_p():
    assert smallest_p(8) == stats.wilcoxon(np.arange(1, 9)).pvalue == 0.0078125
    assert smallest_p(8, 3) == 0.0234375
    assert smallest_p(3, 9) == 1.0


def test_power_is_close_to_that_of_the_t_test_for_normal_tails():
    tails = stats.norm.ppf((np.arange(999) + 0.5) / 999)
    power = signed_rank_power(1.0, tails, 12)
    exact = stats.nct.sf(stats.t.ppf(0.975, 11), 11, math.sqrt(12))
    assert exact - 0.06 < power < exact + 0.02
    assert signed_rank_power(0.0, tails, 12) == pytest.approx(0.0425, abs=0.015)  # P(W <= 13) = 0.0425 / 2
    assert signed_rank_power(5.0, tails, 5) == 0.0


def test_pairs_are_the_fewest_that_reach_the_power():
    tails = stats.t(2).ppf((np.arange(199) + 0.5) / 199)
    count = signed_rank_pairs(1.0, tails)
    assert signed_rank_power(1.0, tails, count) >= 0.8 > signed_rank_power(1.0, tails, count - 1)
    assert signed_rank_pairs(0.01, tails) is None


def test_robust_sd_is_that_of_normal_groups():
    groups = np.random.default_rng(1).normal(scale=0.3, size=(400, 8))
    assert robust_sd(list(groups)) == pytest.approx(0.3, rel=0.05)
    assert robust_sd(list(np.random.default_rng(2).normal(scale=0.3, size=(1500, 3)))) == pytest.approx(
        0.3, rel=0.15
    )
    assert math.isnan(robust_sd([[1.0], []]))


def test_runs_that_fell_behind():
    generator = np.random.default_rng(5)
    values = {name: dict(enumerate(4 + generator.normal(scale=0.02, size=8))) for name in "abc"}
    assert find_behind(values) == []
    values["b"][3] = 4.25
    values["c"][1] = math.nan
    values["a"][0] = 3.7  # far better
    assert find_behind(values) == [("b", 3), ("c", 1)]
    assert find_behind(values, higher_is_better=True) == [("a", 0), ("c", 1)]
    assert find_behind({"a": {1: 4.0}}) == []


@pytest.mark.parametrize("step", [0.01, 1.0])
def test_ties_do_not_make_the_next_value_an_outlier(step):
    """A measure of few values, such as an accuracy on few examples; a run far beyond its steps is named."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        rare = 90 + generator.choice([0, 0, 0, 0, 0, 0, 0, -1, 1], size=(3, 6))
        values = {name: dict(enumerate((step * row).tolist())) for name, row in zip("abc", rare, strict=True)}
        assert find_behind(values, higher_is_better=True) == []
        values["b"] |= {6: 90 * step, 7: 91 * step, 8: 89 * step, 9: 60 * step}
        assert find_behind(values, higher_is_better=True) == [("b", 9)]
    assert find_behind({"a": dict.fromkeys(range(5), 0.98) | {5: 0.97}}, higher_is_better=True) == []
    assert find_behind({"a": dict.fromkeys(range(5), 0.98)}) == []


def test_tails_of_one_sign_count_with_either():
    """The simulated differences are symmetric around the effect, as the test assumes."""
    size = np.abs(stats.norm.ppf((np.arange(999) + 0.5) / 999))
    assert signed_rank_power(0.0, size, 12) == pytest.approx(0.0425, abs=0.015)
    assert signed_rank_power(1.0, size, 12) == pytest.approx(signed_rank_power(1.0, -size, 12), abs=0.03)


@pytest.mark.slow
def test_normal_runs_rarely_fall_behind():
    """One study in a hundred names a run of normal noise."""
    named = 0
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        named += bool(find_behind({name: dict(enumerate(generator.normal(size=8))) for name in "abc"}))
    assert named / 1000 < 0.02
