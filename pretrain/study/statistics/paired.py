"""Pure statistics: intervals of paired differences, their power and spread.

Nothing here knows of runs. scipy is imported where it is used, because that takes a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

import numpy as np

CONFIDENCE = 0.95
"""Of the intervals of reports."""
MOST_PAIRS = 100_000
"""Above so many, pairs_needed gives up."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float
    sd: float
    """Sample standard deviation, n - 1 in its denominator."""
    count: int
    p: float
    """Of the two-sided t-test of zero; 0 or 1 for equal values."""

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t-interval of the mean of two or more paired differences (two-sided), in their unit.

    It covers the true mean with probability *confidence* if the differences are independent and normal.
    """
    from scipy.stats import t

    count, mean, sd = len(differences), fmean(differences), stdev(differences)
    error = sd / math.sqrt(count)
    half = float(t.ppf((1 + confidence) / 2, count - 1)) * error
    p = float(2 * t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Interval(mean, mean - half, mean + half, sd, count, p)


# ---------------------------------------------------------------------- power


def paired_power(effect: float, sd: float, pairs: float, confidence: float = CONFIDENCE) -> float:
    """Probability that a two-sided paired t-test finds a true mean difference.

    With n pairs, t² has the noncentral F distribution with 1 and n - 1 degrees of freedom and noncentrality
    n (effect / sd)². (statsmodels' TTestPower computes the same from the noncentral t, which is NaN for many
    effects above 4 sd, and its solver stops short of few pairs.)

    Args:
        effect: the true mean difference.
        sd: standard deviation of the differences, above 0, in the unit of *effect*.
        pairs: n, at least 2.
        confidence: 1 less the test's level.
    """
    from scipy.stats import f, ncf

    size = min(abs(effect) / sd, 1e6)  # found for certain; far beyond, scipy's ncf is NaN
    return float(ncf.sf(f.ppf(confidence, 1, pairs - 1), 1, pairs - 1, pairs * size**2))


def pairs_needed(effect: float, sd: float, power: float = 0.8, confidence: float = CONFIDENCE) -> int | None:
    """Fewest pairs, at least 2, with which a two-sided paired t-test finds *effect* with this power.

    Args:
        effect: a true mean difference, in the unit of *sd*; its sign does not matter.
        sd: standard deviation of the paired differences.

    Returns:
        None if more than MOST_PAIRS are needed, and if *effect* is zero or something is NaN.
    """
    from scipy.optimize import brentq

    if effect == 0 or math.isnan(effect) or math.isnan(sd):
        return None

    def find_gap(pairs: float) -> float:
        return power - paired_power(effect, sd, pairs, confidence)

    if sd == 0 or find_gap(2) <= 0:
        return 2
    return None if find_gap(MOST_PAIRS) > 0 else math.ceil(brentq(find_gap, 2, MOST_PAIRS))


def detectable_effect(sd: float, pairs: int, power: float = 0.8, confidence: float = CONFIDENCE) -> float:
    """Smallest true mean difference that so many pairs find with this power, in the unit of *sd*.

    The inverse of pairs_needed. NaN below two pairs.

    Args:
        sd: standard deviation of the paired differences.
        power: above 1 - *confidence*, which a difference of zero is found with.
    """
    return math.nan if pairs < 2 else sd * _solve_detectable(pairs, power, confidence)


@lru_cache
def _solve_detectable(pairs: int, power: float, confidence: float) -> float:
    """In standard deviations."""
    from scipy.optimize import brentq

    # 1,000 sd are found by two pairs with a power above 0.9999.
    return float(
        brentq(lambda size: paired_power(size, 1.0, pairs, confidence) - power, 0.0, 1000.0, xtol=1e-12)
    )


# ---------------------------------------------------------------------- spread


def mean_of(values: Iterable[float]) -> float:
    """The mean of at least one value; NaN if a run diverged."""
    numbers = list(values)
    return fmean(numbers) if all(map(math.isfinite, numbers)) else math.nan


def sd_of(values: Iterable[float]) -> float:
    """The sample standard deviation of at least two values; NaN if a run diverged."""
    numbers = list(values)
    return stdev(numbers) if all(map(math.isfinite, numbers)) else math.nan


def pooled_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, pooled over them, in the unit of the values.

    sd² = Σ_g Σ_i (x_gi - mean_g)² / Σ_g (n_g - 1). NaN if no group has two values.
    """
    groups = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    squares = math.fsum(float(np.var(group)) * len(group) for group in groups)
    return math.sqrt(squares / degrees) if degrees else math.nan
