"""Linear models of a design: their columns, their fits, and estimates with intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.study.statistics.paired import CONFIDENCE, t_quantile

MOST_ITERATIONS = 200
"""Of reweighted least squares."""

Matrix = NDArray[np.float64]
Levels = tuple[int, ...]
"""Of each factor, from 0."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, in the unit of the measure."""

    value: float
    low: float
    high: float
    p: float
    """Of the two-sided t-test of zero."""


class Terms:
    """Columns of a linear model: the mean, blocks of seeds, factors, and interactions of two factors.

    Every factor is coded so that the effects of its levels add up to zero.

    Args:
        counts: levels of each factor.
        seeds: how many blocks there are.
        interactions: pairs of factors.
    """

    def __init__(
        self, counts: Sequence[int], seeds: int, interactions: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.counts, self.interactions = counts, tuple(interactions)
        self.codes = [_sum_coding(count) for count in counts]
        self.seed_code = _sum_coding(seeds)
        sizes: dict[Any, int] = {"mean": 1, "seeds": seeds - 1}
        sizes |= {factor: count - 1 for factor, count in enumerate(counts)}
        sizes |= {(a, b): (counts[a] - 1) * (counts[b] - 1) for a, b in self.interactions}
        ends = list(itertools.accumulate(sizes.values()))
        self.slices = {
            name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.width = ends[-1]

    def row(self, levels: Levels, seed: int | None = None) -> Matrix:
        """The columns for a combination and a seed's number; None for the mean of the seeds."""
        parts = [np.ones(1), np.zeros(len(self.seed_code) - 1) if seed is None else self.seed_code[seed]]
        coded = [code[level] for code, level in zip(self.codes, levels, strict=True)]
        products = [np.outer(coded[a], coded[b]).ravel() for a, b in self.interactions]
        return np.concatenate([*parts, *coded, *products])

    def effects(self, factor: int) -> Matrix:
        """What multiplies the coefficients to give the effect of each level: (levels, width)."""
        weights = np.zeros((self.counts[factor], self.width))
        weights[:, self.slices[factor]] = self.codes[factor]
        return weights

    def difference(self, sides: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> Matrix:
        """What multiplies the coefficients to give the mean of some levels less that of others: (width,).

        Args:
            sides: by factor, the levels that are added and those that are subtracted; of two factors, whose
                interaction is in the model, the difference of one at the levels of the other that are added
                less the difference at those that are subtracted.
        """
        codes = {
            factor: self.codes[factor][list(plus)].mean(axis=0) - self.codes[factor][list(minus)].mean(axis=0)
            for factor, (plus, minus) in sides.items()
        }
        first, *second = sorted(codes)
        weights = np.zeros(self.width)
        if second:
            weights[self.slices[first, second[0]]] = np.outer(codes[first], codes[second[0]]).ravel()
        else:
            weights[self.slices[first]] = codes[first]
        return weights


def _sum_coding(count: int) -> Matrix:
    """(count, count - 1): a level's own column, and -1 in all for the last level."""
    return np.vstack([np.eye(count - 1), -np.ones((1, count - 1))])


@dataclass(frozen=True)
class Fit:
    """Coefficients of a linear model, and how well they are known."""

    coefficients: Matrix
    covariance: Matrix
    inverse: Matrix
    """Of X'X."""
    sd: float
    """Of the error, by the fit's own estimate."""
    degrees: int
    """Of freedom, of the error."""

    @classmethod
    def least_squares(cls, matrix: Matrix, response: Matrix) -> Fit:
        """By ordinary least squares."""
        from statsmodels.api import OLS

        fitted = OLS(response, matrix).fit()
        return cls._from_fitted(fitted, math.sqrt(fitted.scale))

    @classmethod
    def robust(cls, matrix: Matrix, response: Matrix) -> Fit | None:
        """By Huber's M-estimate with c = 1.345; None if it does not converge, as where nothing is left for
        the error.

        The scale is Huber's proposal 2 and the covariance his second one (Huber, Robust Statistics, 1981):
        they count the degrees of freedom. The usual scale, the median absolute deviation, does not, and with
        two coefficients for five runs its intervals are too narrow.
        """
        import statsmodels.api as sm

        model = sm.RLM(response, matrix, M=sm.robust.norms.HuberT())
        try:
            with np.errstate(divide="ignore", invalid="ignore"):
                fitted = model.fit(maxiter=MOST_ITERATIONS, scale_est=sm.robust.scale.HuberScale(), cov="H2")
        except ValueError:  # nearly all values are ties: a scale of zero makes weights that are not numbers
            return None
        converged = fitted.fit_history["iteration"] < MOST_ITERATIONS
        good = converged and fitted.scale > 0 and np.isfinite(fitted.cov_params()).all()
        return cls._from_fitted(fitted, fitted.scale) if good else None

    @classmethod
    def _from_fitted(cls, fitted: Any, sd: float) -> Fit:
        return cls(
            np.asarray(fitted.params),
            np.asarray(fitted.cov_params()),
            np.asarray(fitted.model.normalized_cov_params),
            float(sd),
            int(fitted.df_resid),
        )

    def combine(self, weights: Matrix) -> list[Estimate]:
        """Combinations of the coefficients: (combinations, width); t-intervals with the error's degrees."""
        from scipy.stats import t as t_distribution

        values = weights @ self.coefficients
        errors = np.sqrt(np.maximum(np.einsum("iw,wv,iv->i", weights, self.covariance, weights), 0))
        quantile = t_quantile(self.degrees, CONFIDENCE)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = 2 * t_distribution.sf(np.abs(values / errors), self.degrees)
        return [
            Estimate(
                float(value), float(value - quantile * error), float(value + quantile * error), float(each)
            )
            for value, error, each in zip(values, errors, p, strict=True)
        ]
