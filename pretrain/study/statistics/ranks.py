"""Statistics that few values far from the others move little: signed ranks of paired differences, and
outliers.

Nothing here knows of runs. scipy is imported where it is used, because that takes a while.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pretrain.study.statistics.paired import CONFIDENCE

FAR = 4.0
"""In robust standard deviations: a run that is worse than its variant's median by more is an outlier."""
TO_SD = 1 / (math.sqrt(2) * 0.6744897501960817)
"""What makes the median distance of two normal values their standard deviation: 0.674 is the third quartile
of a standard normal."""


@dataclass(frozen=True)
class RankInterval:
    """The Hodges-Lehmann estimate of the difference, with its exact interval and test."""

    estimate: float
    """The median of the means of all pairs of differences, each also with itself, in their unit."""
    low: float
    high: float
    level: float
    """Confidence of the interval: the smallest possible that reaches the requested one, else the largest."""
    p: float
    """Of Wilcoxon's signed-rank test of zero, two-sided; exact without zeros and ties."""


def signed_rank(differences: Sequence[float], confidence: float = CONFIDENCE) -> RankInterval:
    """The Hodges-Lehmann estimate of finite differences (Annals of Mathematical Statistics 34, 1963).

    The interval and the test hold for independent differences of one symmetric distribution, with any tails.
    The interval's ends are ordered Walsh averages (Hollander and Wolfe, Nonparametric Statistical Methods,
    3.3).
    """
    from scipy.stats import wilcoxon

    values = np.asarray(differences, dtype=float)
    count = len(values)
    rows, columns = np.triu_indices(count)
    averages = np.sort((values[rows] + values[columns]) / 2)
    cumulative = np.cumsum(_null(count))
    place = max(1, int(np.searchsorted(cumulative, (1 - confidence) / 2, side="right")))
    exact = np.all(values != 0) and len(set(np.abs(values))) == count
    p = wilcoxon(values, method="exact" if exact else "auto").pvalue if np.any(values) else 1.0
    return RankInterval(
        float(np.median(averages)),
        float(averages[place - 1]),
        float(averages[len(averages) - place]),
        float(1 - 2 * cumulative[place - 1]),
        float(p),
    )


@lru_cache
def _null(count: int) -> NDArray[np.float64]:
    """The probabilities of 0 … n (n + 1) / 2 for the sum of ranks of the positive ones of n differences, if
    signs are tosses of a coin."""
    probabilities = np.ones(1)
    for rank in range(1, count + 1):
        without = np.concatenate([probabilities, np.zeros(rank)])
        with_it = np.concatenate([np.zeros(rank), probabilities])
        probabilities = (without + with_it) / 2
    return probabilities


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
    finite = {
        name: {seed: value for seed, value in by_seed.items() if math.isfinite(value)}
        for name, by_seed in values.items()
    }
    limit = FAR * robust_sd([list(by_seed.values()) for by_seed in finite.values()])
    sign = -1 if higher_is_better else 1
    return [
        (name, seed)
        for name, by_seed in values.items()
        for seed, value in by_seed.items()
        if not math.isfinite(value) or sign * (value - median(finite[name].values())) > limit
    ]
