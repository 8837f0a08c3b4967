"""Pure statistics: intervals of paired differences, their power, regression, and when a curve gets somewhere.

Nothing here knows of runs. scipy is imported where it is used, because that takes a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np

MOST_PAIRS = 100_000
"""Above so many, pairs_needed gives up."""
MOST_INFLATION = 10.0
"""A larger variance inflation factor counts as collinear (the usual rule of thumb)."""
NO_WRONG_SIGN = 8.0
"""From this noncentrality on, an estimate that is significant with the wrong sign has a probability below 1e-15."""
NO_VARIANCE = 1e-10
"""Up to this share of a feature's variance, what other features leave unexplained is rounding."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, in the unit of the values."""

    mean: float
    low: float
    """NaN for fewer than two values, as are ``high`` and ``sd``."""
    high: float
    sd: float
    """Sample standard deviation, n - 1 in its denominator."""
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside."""
        return self.low > 0 or self.high < 0


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t-interval of the mean of paired differences (two-sided), in their unit.

    It covers the true mean with probability *confidence* if the differences are independent and normal.
    """
    count = len(differences)
    mean = fmean(differences) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, math.nan, count)
    sd = stdev(differences)
    half = _quantile(count - 1, confidence) * sd / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, sd, count)


@lru_cache
def _quantile(degrees: int, confidence: float) -> float:
    """What |t| exceeds with probability 1 - confidence."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, degrees))


# ---------------------------------------------------------------------- power


def paired_power(effect: float, sd: float, pairs: int, confidence: float = 0.95) -> float:
    """Probability that a two-sided paired t-test finds a true mean difference.

    With n pairs, t has the noncentral t distribution with n - 1 degrees of freedom and noncentrality √n effect / sd.

    Args:
        effect: the true mean difference.
        sd: standard deviation of the differences, above 0, in the unit of *effect*.
        pairs: n, at least 2.
        confidence: 1 less the test's level.
    """
    from scipy.stats import nct

    degrees, shift = pairs - 1, abs(effect) / sd * math.sqrt(pairs)
    limit = _quantile(degrees, confidence)
    # The wrong tail is below Φ(-shift), and scipy's is NaN far out.
    wrong = float(nct.cdf(-limit, degrees, shift)) if shift < NO_WRONG_SIGN else 0.0
    return float(nct.sf(limit, degrees, shift)) + wrong


def pairs_needed(effect: float, sd: float, power: float = 0.8, confidence: float = 0.95) -> int | None:
    """Fewest pairs, at least 2, with which a two-sided paired t-test finds *effect* with this power.

    Exact, by the noncentral t distribution (see paired_power).

    Args:
        effect: a true mean difference, in the unit of *sd*; its sign does not matter.
        sd: standard deviation of the paired differences.

    Returns:
        None if more than MOST_PAIRS are needed, and if *effect* is zero or something is NaN.
    """
    if effect == 0 or math.isnan(effect) or math.isnan(sd):
        return None

    def enough(pairs: int) -> bool:
        return sd == 0 or paired_power(effect, sd, pairs, confidence) >= power

    few, many = 1, 2
    while not enough(many):
        if many == MOST_PAIRS:
            return None
        few, many = many, min(2 * many, MOST_PAIRS)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def detectable_effect(sd: float, pairs: int, power: float = 0.8, confidence: float = 0.95) -> float:
    """Smallest true mean difference that so many pairs find with this power, in the unit of *sd*.

    The inverse of pairs_needed. NaN below two pairs.

    Args:
        sd: standard deviation of the paired differences.
        power: above 1 - *confidence*, which a difference of zero is found with.
    """
    return math.nan if pairs < 2 else sd * _detectable(pairs, power, confidence)


@lru_cache
def _detectable(pairs: int, power: float, confidence: float) -> float:
    """In standard deviations."""
    from scipy.optimize import brentq

    def missing(effect: float) -> float:
        return paired_power(effect, 1.0, pairs, confidence) - power

    high = 1.0
    while missing(high) < 0:
        high *= 2
    return float(brentq(missing, 0.0, high, xtol=1e-12))


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
    degrees = degrees_of_freedom(groups)
    return math.sqrt(sum(_squares(group) for group in groups) / degrees) if degrees else math.nan


def degrees_of_freedom(groups: Sequence[Sequence[float]]) -> int:
    """Of pooled_sd: Σ_g (n_g - 1) over the groups that have values."""
    return sum(len(group) - 1 for group in groups if group)


def spread_apart(groups: Mapping[str, Sequence[float]], level: float = 0.01) -> list[str]:
    """The groups that spread more than the others, the widest first; pooling them would say too much of the others.

    The k widest are set apart, for the largest k at which the k-th widest is wider than the narrower ones pooled, by a
    one-sided F-test at *level* divided by the number of groups. They are half of the groups at most, and two are left.
    In simulated groups of equal spread up to 1 % of the sets have any.
    """
    from scipy.stats import f

    several = {name: values for name, values in groups.items() if len(values) > 1}
    widest = sorted(several, key=lambda name: -stdev(several[name]))
    for count in range(min(len(widest) // 2, len(widest) - 2), 0, -1):
        last = several[widest[count - 1]]
        others = [several[name] for name in widest[count:]]
        own, between = stdev(last), pooled_sd(others)
        ratio = (own / between) ** 2 if between else math.inf if own else 0.0
        if f.sf(ratio, len(last) - 1, degrees_of_freedom(others)) < level / len(several):
            return widest[:count]
    return []


def shared_degrees(counts: Sequence[int]) -> float:
    """Effective degrees of freedom of the pooled sd of differences of V variants from one baseline.

    (n - 1) 4 V / (V + 3) where each has n pairs: with equal variances, Σ = σ² (I + J), (tr Σ)² / tr Σ² = 4 V / (V + 3)
    (Satterthwaite). More variants add little, since the baseline's runs are in all differences.

    Args:
        counts: pairs of each variant.
    """
    degrees = sum(count - 1 for count in counts if count)
    return degrees * 4 / (len([count for count in counts if count > 1]) + 3)


def _squares(values: Sequence[float]) -> float:
    """Sum of squared distances from the mean."""
    mean = fmean(values) if values else 0.0
    return math.fsum((value - mean) ** 2 for value in values)


def sd_interval(sd: float, degrees: float, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the standard deviation of normal values: sd √(degrees / χ²), NaN without degrees."""
    from scipy.stats import chi2

    if degrees < 1:
        return math.nan, math.nan
    outside = (1 - confidence) / 2
    low, high = (sd * math.sqrt(degrees / chi2.ppf(share, degrees)) for share in (1 - outside, outside))
    return float(low), float(high)


# ---------------------------------------------------------------------- regression


@dataclass(frozen=True)
class Coefficient:
    """What a linear regression says of one feature. Limits are those of 95 % t-intervals; NaN where there are none."""

    name: str
    raw: float
    """Change of the outcome for one unit of the feature, the others unchanged; NaN if the others determine it."""
    raw_low: float
    raw_high: float
    standardised: float
    """The same in standard deviations of the outcome, for one standard deviation of the feature."""
    standardised_low: float
    standardised_high: float
    correlation: float
    """Pearson's, of this feature alone with the outcome."""
    inflation: float
    """Variance inflation factor, 1 / (1 - R²) of this feature on the others; infinite if they determine it."""


@dataclass(frozen=True)
class Regression:
    """A linear regression with an intercept, by least squares."""

    coefficients: tuple[Coefficient, ...]
    """In the order of the features; those that do not vary are left out."""
    intercept: float
    """NaN if features determine one another."""
    r_squared: float
    """Share of the outcome's variance that the features explain together; NaN if the outcome does not vary."""
    points: int
    degrees: int
    """Points - features - 1; below 1 there are no intervals."""
    warnings: list[str]
    """Why not to believe it, a sentence each."""


def regress(features: Mapping[str, Sequence[float]], outcome: Sequence[float]) -> Regression:
    """Regress *outcome* on *features*, all values finite, one of each for every point.

    Raises:
        ValueError: a feature has another number of values than the outcome.
    """
    values = np.asarray(outcome, dtype=np.float64)
    table = {name: np.asarray(column, dtype=np.float64) for name, column in features.items()}
    for name, column in table.items():
        if len(column) != len(values):
            raise ValueError(f"{name}: {len(column)} values for {len(values)} points")
    constant = [name for name, column in table.items() if not _varies(column)]
    table = {name: column for name, column in table.items() if name not in constant}
    warnings = [f"left out, since it is the same at every point: {name}" for name in constant]
    points, degrees = len(values), len(values) - len(table) - 1
    if degrees < 1:
        warnings.append(
            f"{points} points are too few for intervals of {len(table)} features; there must be {len(table) + 2}"
        )
    inflations = {name: _inflation(name, table) for name in table}
    collinear = [name for name, inflation in inflations.items() if inflation > MOST_INFLATION]
    if collinear:
        warnings.append(
            "collinear, so that their coefficients cannot be told apart: "
            + ", ".join(f"{name} ({_inflated(inflations[name])})" for name in collinear)
        )
    spread = float(np.std(values, ddof=1)) if points > 1 else math.nan
    if not table or not spread > 0:
        coefficients = tuple(
            _coefficient(name, math.nan, math.nan, math.nan, math.nan, inflations[name]) for name in table
        )
        if points > 1 and not spread > 0:
            warnings.append("the outcome is the same at every point")
        intercept = float(values.mean()) if points and not table else math.nan
        return Regression(coefficients, intercept, 0.0 if spread > 0 else math.nan, points, degrees, warnings)
    means = {name: float(column.mean()) for name, column in table.items()}
    spreads = {name: float(np.std(column, ddof=1)) for name, column in table.items()}
    scaled = np.stack([(column - means[name]) / spreads[name] for name, column in table.items()], axis=1)
    target = (values - values.mean()) / spread
    # A pseudo-inverse: where features determine one another, the coefficients of the others are still those of least
    # squares, and so are the fitted values.
    inverse = np.linalg.pinv(scaled, rcond=math.sqrt(NO_VARIANCE))
    slopes = inverse @ target
    residual = float(np.square(target - scaled @ slopes).sum())
    rank = int(np.linalg.matrix_rank(scaled, tol=math.sqrt(NO_VARIANCE * points)))
    errors = np.full(len(table), math.nan)
    if degrees >= 1:
        errors = np.sqrt(residual / (points - rank - 1) * np.square(inverse).sum(axis=1))
        errors = errors * _quantile(points - rank - 1, 0.95)
    found = []
    for index, name in enumerate(table):
        slope = float(slopes[index]) if math.isfinite(inflations[name]) else math.nan
        half, unit = float(errors[index]), spread / spreads[name]
        correlation = float(scaled[:, index] @ target) / (points - 1)
        found.append(_coefficient(name, slope, half, unit, correlation, inflations[name]))
    intercept = float(values.mean()) - sum(each.raw * means[each.name] for each in found)
    r_squared = 1 - residual / float(np.square(target).sum())
    return Regression(tuple(found), intercept, r_squared, points, degrees, warnings)


def _varies(column: np.ndarray) -> bool:
    """Whether values differ by more than rounding."""
    return len(column) > 0 and bool(np.ptp(column) > 1e-12 * np.abs(column).max())


def _inflated(inflation: float) -> str:
    return f"variance inflation {inflation:.3g}" if math.isfinite(inflation) else "the others determine it"


def _coefficient(
    name: str, slope: float, half: float, unit: float, correlation: float, inflation: float
) -> Coefficient:
    """From the standardised slope, half of its interval, and what one of it is in the outcome over the feature."""
    low, high = slope - half, slope + half
    return Coefficient(name, slope * unit, low * unit, high * unit, slope, low, high, correlation, inflation)


def _inflation(name: str, table: dict[str, np.ndarray]) -> float:
    """The variance inflation factor of a feature that varies."""
    column = table[name] - table[name].mean()
    others = [other - other.mean() for key, other in table.items() if key != name]
    if not others:
        return 1.0
    scaled = np.stack([other / np.linalg.norm(other) for other in others], axis=1)
    slopes = np.linalg.lstsq(scaled, column, rcond=None)[0]
    left = float(np.square(column - scaled @ slopes).sum() / np.square(column).sum())
    return math.inf if left <= NO_VARIANCE else 1 / left


# ---------------------------------------------------------------------- curves


def tokens_to_reach(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Tokens at which a loss is at or below *target* for the first time; None if it never is.

    Args:
        curve: tokens and loss of each validation, in order. Between two, the loss is taken to be a straight line.
            Before the first one nothing is known: a curve that begins below the target reaches it there.
    """
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (early, above), (late, below) in pairwise(curve):
        if below <= target:
            # After a loss that is not finite there is no line.
            share = (above - target) / (above - below) if math.isfinite(above) else 1.0
            return early + (late - early) * share
    return None
