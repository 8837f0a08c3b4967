"""Pure statistics: intervals of paired differences, their power and spread, and when a curve gets somewhere.

Nothing here knows of runs. scipy and statsmodels are imported where they are used, because that takes a
while.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np

MOST_PAIRS = 100_000
"""Above so many, pairs_needed gives up."""


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


def paired_power(effect: float, sd: float, pairs: float, confidence: float = 0.95) -> float:
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


def pairs_needed(effect: float, sd: float, power: float = 0.8, confidence: float = 0.95) -> int | None:
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

    def missing(pairs: float) -> float:
        return power - paired_power(effect, sd, pairs, confidence)

    if sd == 0 or missing(2) <= 0:
        return 2
    return None if missing(MOST_PAIRS) > 0 else math.ceil(brentq(missing, 2, MOST_PAIRS))


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


def effective_degrees(groups: Sequence[Sequence[tuple[Hashable, Hashable]]]) -> float:
    """Degrees of freedom of the pooled_sd of groups of differences between runs, which may share runs.

    With D the runs' signs in each difference and C what subtracts each group's mean, the sum of squares is
    x' (CD)' CD x. For independent normal runs x of equal variance its first two moments are those of a χ² of
    tr(M)² / tr(M²) degrees, M = (CD)' CD (Satterthwaite, Biometrics Bulletin 2, 1946). Without shared runs
    these are Σ_g (n_g - 1).

    Args:
        groups: of each difference, a name of the run and one of the run that is subtracted.

    Returns:
        NaN if no group has two differences.
    """
    from scipy.sparse import csr_array

    pairs = [pair for group in groups for pair in group]
    sizes = np.array([len(group) for group in groups], dtype=int)
    runs = {run: column for column, run in enumerate(dict.fromkeys(run for pair in pairs for run in pair))}
    rows = np.arange(len(pairs))
    signs = csr_array(
        (
            np.tile([1.0, -1.0], len(pairs)),
            (np.repeat(rows, 2), np.array([runs[run] for pair in pairs for run in pair], dtype=int)),
        ),
        shape=(len(pairs), len(runs)),
    )
    weights = np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes)
    means = csr_array(
        (weights, (np.repeat(np.arange(len(groups)), sizes), rows)), shape=(len(groups), len(pairs))
    )
    centred = signs - means.T @ (means @ signs)
    moments = centred.T @ centred
    return float(moments.trace() ** 2 / moments.power(2).sum()) if max(sizes, default=0) > 1 else math.nan


def sd_interval(sd: float, degrees: float, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the sd of normal values, sd √(degrees / χ²); NaN for NaN degrees."""
    from scipy.stats import chi2

    low, high = sd * np.sqrt(degrees / np.array(chi2.interval(confidence, degrees))[::-1])
    return float(low), float(high)


# ---------------------------------------------------------------------- regression

MOST_INFLATION = 10.0
"""A larger variance inflation factor counts as collinear (the usual rule of thumb)."""
NO_VARIANCE = 1e-10
"""Up to this share of a feature's variance, what other features leave unexplained is rounding."""


@dataclass(frozen=True)
class Coefficient:
    """What a linear regression says of one feature. Limits are those of 95 % t-intervals; NaN where there are
    none."""

    name: str
    raw: float
    """Change of the outcome for one unit of the feature, the others unchanged; NaN if the others determine
    it."""
    raw_low: float
    raw_high: float
    standardised: float
    """The same in standard deviations of the outcome, for one standard deviation of the feature."""
    standardised_low: float
    standardised_high: float
    correlation: float
    """Pearson's, of this feature alone with the outcome."""
    inflation: float
    """Variance inflation factor, 1 / (1 - R²) of this feature on the others; infinite if they determine
    it."""


@dataclass(frozen=True)
class Regression:
    """A linear regression with an intercept, by least squares."""

    coefficients: tuple[Coefficient, ...]
    """In the order of the features; those that do not vary are left out."""
    intercept: float
    """NaN if features determine one another."""
    r_squared: float
    """Share of the outcome's variance that the features explain together; NaN if the outcome does not
    vary."""
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
    # A pseudo-inverse: where features determine one another, the coefficients of the others are still those
    # of least squares, and so are the fitted values.
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
    """From the standardised slope, half of its interval, and what one of it is in the outcome over the
    feature."""
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
        curve: tokens and loss of each validation, in order. Between two, the loss is taken to be a straight
            line.
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
