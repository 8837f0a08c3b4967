"""Pure statistics: intervals of paired differences, their power and spread, and outliers.

Nothing here knows of runs. scipy is imported where it is used, because that takes a while.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np

CONFIDENCE = 0.95
"""Of the intervals of reports."""
MOST_PAIRS = 100_000
"""Above so many, pairs_needed gives up."""
FAR = 4.0
"""In robust standard deviations: a run that is worse than its variant's median by more is an outlier."""
TO_SD = 1 / (math.sqrt(2) * 0.6744897501960817)
"""What makes the median distance of two normal values their standard deviation: 0.674 is the third quartile
of a standard normal."""


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, in the unit of the measure."""

    value: float
    low: float
    high: float
    p: float
    """Of the two-sided t-test of zero; 0 or 1 for equal values."""


def fits_disagree(plain: Estimate | None, robust: Estimate | None) -> bool:
    """Whether one estimate is outside the other's interval, or one interval alone excludes zero."""
    if plain is None or robust is None:
        return False
    inside = plain.low <= robust.value <= plain.high and robust.low <= plain.value <= robust.high
    return len({each.low > 0 or each.high < 0 for each in (plain, robust)}) > 1 or not inside


def paired_interval(differences: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Student's t-interval of the mean of two or more paired differences (two-sided), in their unit.

    It covers the true mean with probability *confidence* if the differences are independent and normal.
    """
    from scipy.stats import t

    count, mean = len(differences), fmean(differences)
    error = stdev(differences) / math.sqrt(count)
    half = float(t.ppf((1 + confidence) / 2, count - 1)) * error
    p = float(2 * t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, p)


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
    from scipy.optimize import brentq

    def find_gap(size: float) -> float:
        return paired_power(size, 1.0, pairs, confidence) - power

    # 1,000 sd are found by two pairs with a power above 0.9999.
    return math.nan if pairs < 2 else sd * float(brentq(find_gap, 0.0, 1000.0, xtol=1e-12))


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


# ---------------------------------------------------------------------- outliers


def robust_sd(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation within groups, pooled, from the median distance of two values of a group (Shamos).

    NaN without a group of two. Where most distances are 0, as those of accuracies on few examples, they have
    no scale, and the median of the others is taken: else the smallest step of such a measure would be
    infinitely many standard deviations.
    """
    distances = [abs(a - b) for group in groups for a, b in itertools.combinations(group, 2)]
    typical = median(distances) if distances else math.nan
    return TO_SD * (typical or median([distance for distance in distances if distance] or [0.0]))


def find_outliers(
    values: Mapping[str, Mapping[int, float]], higher_is_better: bool = False
) -> list[tuple[str, int]]:
    """The runs that are worse than the median of their variant by more than FAR pooled robust standard
    deviations, and those that are not finite.

    Args:
        values: by variant and seed.

    Returns:
        Variant and seed of each.
    """
    finite = {name: [each for each in by.values() if math.isfinite(each)] for name, by in values.items()}
    limit, sign = FAR * robust_sd(list(finite.values())), -1 if higher_is_better else 1
    return [
        (name, seed)
        for name, by_seed in values.items()
        for seed, value in by_seed.items()
        if not math.isfinite(value) or sign * (value - median(finite[name])) > limit
    ]
