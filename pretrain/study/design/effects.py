"""What a designed experiment shows: effects of levels, shares of the variance, and predicted schedules.

Additive models with the seeds as blocks, by least squares and by Huber's M-estimate (statsmodels).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pretrain.study.design.factors import Design
from pretrain.study.statistics.linear_model import Estimate, Fit, Levels, Matrix, Terms
from pretrain.study.statistics.ranks import FAR

FEWEST_DEGREES = 5
"""Interactions are in the model if so many degrees of freedom are left for the error, and LEFT_OVER."""
LEFT_OVER = 0.25
"""Of the runs: a model with nearly as many columns as runs fits their noise."""


@dataclass(frozen=True)
class LevelEffect:
    """How a level of a factor differs from the mean of the factor's levels."""

    factor: str
    level: str
    runs: int
    behind: int
    """How many of the runs fell behind."""
    least_squares: Estimate
    robust: Estimate | None
    """None where the fit did not converge, or left no error."""


@dataclass(frozen=True)
class TermVariance:
    """A line of the analysis of variance."""

    term: str
    degrees: int
    share: float
    """Of the sum of squares of all terms and the error."""
    f: float
    p: float


@dataclass(frozen=True)
class Primary:
    """A contrast that was stated with the design."""

    name: str
    estimate: Estimate | None
    """None for one of an interaction, where interactions are not in the model."""
    robust: Estimate | None
    adjusted: float
    """p after Holm's adjustment for the number of the design's contrasts."""


@dataclass(frozen=True)
class Prediction:
    """The loss that the additive model predicts."""

    name: str
    levels: tuple[str, ...]
    """Of each factor."""
    estimate: Estimate
    measured: float | None
    """The mean of the runs of that combination, if it was trained."""


@dataclass(frozen=True)
class Effects:
    """The analysis of a design's finished runs.

    Args:
        values: the result by variant and seed.
        higher_is_better: of the measure.
    """

    design: Design
    values: Mapping[str, Mapping[int, float]]
    higher_is_better: bool = False

    @cached_property
    def data(self) -> list[tuple[str, int, float]]:
        """Variant, number of the seed and value of every finite run."""
        return [
            (variant, self.seeds.index(seed), value)
            for variant, by_seed in self.values.items()
            for seed, value in by_seed.items()
            if math.isfinite(value)
        ]

    @cached_property
    def seeds(self) -> list[int]:
        """Those that have a finite value."""
        return sorted(
            {seed for by in self.values.values() for seed, value in by.items() if math.isfinite(value)}
        )

    @cached_property
    def left_out(self) -> int:
        """Runs whose value is not finite."""
        return sum(len(by_seed) for by_seed in self.values.values()) - len(self.data)

    @cached_property
    def response(self) -> Matrix:
        """The values."""
        return np.array([value for _, _, value in self.data])

    def matrix(self, terms: Terms) -> Matrix:
        """A row of the model's columns for each run: (runs, width)."""
        return np.array([terms.row(self.design.rows[variant], seed) for variant, seed, _ in self.data])

    def terms(self, interactions: bool) -> Terms:
        """The columns with or without interactions of two factors."""
        counts = [len(factor.levels) for factor in self.design.factors]
        pairs = list(itertools.combinations(range(len(counts)), 2)) if interactions else []
        return Terms(counts, max(1, len(self.seeds)), pairs)

    @cached_property
    def main(self) -> Terms:
        """The columns without interactions."""
        return self.terms(False)

    @cached_property
    def unknown(self) -> str:
        """Why there is no analysis; empty if there is."""
        terms = self.main
        if len(self.data) < terms.width + 1:
            return (
                f"{len(self.data)} finished runs for {terms.width} coefficients; at least one more is needed"
            )
        if np.linalg.matrix_rank(self.matrix(terms)) < terms.width:
            return "the finished runs do not determine all effects"
        return ""

    @cached_property
    def model(self) -> Terms:
        """The columns that are fitted: with interactions of two factors where these can be estimated."""
        terms = self.terms(True)
        runs = len(self.data)
        enough = runs - terms.width >= max(FEWEST_DEGREES, LEFT_OVER * runs)
        if enough and np.linalg.matrix_rank(self.matrix(terms)) == terms.width:
            return terms
        return self.main

    @cached_property
    def least_squares(self) -> Fit:
        """The model by least squares."""
        return Fit.least_squares(self.matrix(self.model), self.response)

    @cached_property
    def robust(self) -> Fit | None:
        """The model by Huber's M-estimate; None where it does not converge."""
        return Fit.robust(self.matrix(self.model), self.response)

    @cached_property
    def behind(self) -> list[tuple[str, int]]:
        """Variant and seed of the runs that are worse than the robust fit by more than FAR of its standard
        deviations, and of those that are not finite."""
        far = []
        if not self.unknown and self.robust is not None:
            residuals = self.response - self.matrix(self.model) @ self.robust.coefficients
            sign = -1 if self.higher_is_better else 1
            # The median absolute residual is as good as 0 where most values are ties; this one is not.
            limit = FAR * self.robust.sd
            for (variant, seed, _), residual in zip(self.data, residuals, strict=True):
                if sign * residual > limit:
                    far.append((variant, self.seeds[seed]))
        return far + [
            (variant, seed)
            for variant, by_seed in self.values.items()
            for seed, value in by_seed.items()
            if not math.isfinite(value)
        ]

    @cached_property
    def additive(self) -> Fit:
        """The model without interactions, which predicts."""
        return Fit.least_squares(self.matrix(self.main), self.response)

    @cached_property
    def levels(self) -> list[LevelEffect]:
        """The effect of every level of every factor."""
        found = []
        for place, factor in enumerate(self.design.factors):
            weights = self.model.effects(place)
            fits = [
                self.least_squares.combine(weights),
                self.robust.combine(weights) if self.robust else None,
            ]
            of_level = [self.design.rows[variant][place] for variant, _, _ in self.data]
            behind = [self.design.rows[variant][place] for variant, _ in self.behind]
            for level, name in enumerate(factor.levels):
                plain, robust = (fit[level] if fit else None for fit in fits)
                assert plain is not None
                counts = of_level.count(level), behind.count(level)
                found.append(LevelEffect(factor.name, name, *counts, plain, robust))
        return found

    @cached_property
    def variance(self) -> list[TermVariance]:
        """The analysis of variance: each term's sum of squares given all others (of type III), and the error.

        With all runs of a balanced array these add up to that of the values."""
        from scipy.stats import f as f_distribution

        fit, lines = self.least_squares, []
        for name, place in self.model.slices.items():
            degrees = place.stop - place.start
            if name == "mean" or not degrees:
                continue
            own = fit.coefficients[place]
            squares = float(own @ np.linalg.solve(fit.inverse[place, place], own))
            f = squares / degrees / fit.sd**2
            p = float(f_distribution.sf(f, degrees, fit.degrees))
            lines.append((self.name_term(name), degrees, squares, f, p))
        lines.append(("error", fit.degrees, fit.sd**2 * fit.degrees, math.nan, math.nan))
        total = sum(squares for _, _, squares, _, _ in lines)
        return [TermVariance(term, n, squares / total, f, p) for term, n, squares, f, p in lines]

    def name_term(self, term: Any) -> str:
        """A term's name: seeds, a factor, or two factors with a colon."""
        names = [factor.name for factor in self.design.factors]
        if isinstance(term, tuple):
            return ":".join(names[place] for place in term)
        return names[term] if isinstance(term, int) else str(term)

    @cached_property
    def confounded(self) -> dict[str, list[str]]:
        """By main effect the interactions of two factors that it is confounded with, and at strength 3 by
        interaction the others. Empty where all can be estimated."""
        terms = self.terms(True)
        rows = np.array([terms.row(levels) for levels in self.design.rows.values()])
        products = np.abs(rows.T @ rows)
        pairs = terms.interactions
        mains: list[Any] = list(range(len(terms.counts)))
        found = {}
        for term in mains if self.design.strength < 3 else pairs if self.design.strength == 3 else []:
            own = {term} if isinstance(term, int) else set(term)
            others = [
                self.name_term(pair)
                for pair in pairs
                if not own & set(pair) and products[terms.slices[term], terms.slices[pair]].max() > 1e-9
            ]
            if others:
                found[self.name_term(term)] = others
        return found

    @cached_property
    def interactions(self) -> dict[tuple[int, int], Matrix]:
        """Means of the runs at each pair of levels, by pair of factors, if interactions are in the model.

        The pair with the largest share of the variance is the first."""
        shares = {line.term: line.share for line in self.variance}
        found = {}
        for pair in sorted(self.model.interactions, key=lambda pair: -shares[self.name_term(pair)]):
            cells: dict[tuple[int, int], list[float]] = {}
            for variant, _, value in self.data:
                levels = self.design.rows[variant]
                cells.setdefault((levels[pair[0]], levels[pair[1]]), []).append(value)
            shape = (self.model.counts[pair[0]], self.model.counts[pair[1]])
            found[pair] = np.array(
                [[np.mean(cells.get((a, b), [math.nan])) for b in range(shape[1])] for a in range(shape[0])]
            )
        return found

    @cached_property
    def lack_of_fit(self) -> tuple[float, float] | None:
        """F and p of what combinations differ in beyond the model, against how a combination's runs differ.

        None with one seed, or if the model leaves nothing over."""
        from scipy.stats import f as f_distribution

        variants = list(dict.fromkeys(variant for variant, _, _ in self.data))
        saturated = np.zeros((len(self.data), len(variants) + len(self.seeds)))
        for row, (variant, seed, _) in enumerate(self.data):
            saturated[row, [variants.index(variant), len(variants) + seed]] = 1
        fitted, _, rank, _ = np.linalg.lstsq(saturated, self.response)
        pure_degrees = len(self.data) - int(rank)
        fit = self.least_squares
        degrees = fit.degrees - pure_degrees
        if pure_degrees < 1 or degrees < 1:
            return None
        pure = float(np.sum((self.response - saturated @ fitted) ** 2))
        f = (fit.sd**2 * fit.degrees - pure) / degrees / (pure / pure_degrees)
        return f, float(f_distribution.sf(f, degrees, pure_degrees))

    @cached_property
    def primary(self) -> list[Primary]:
        """The design's contrasts, with Holm's adjustment."""
        from statsmodels.stats.multitest import multipletests

        places = {factor.name: place for place, factor in enumerate(self.design.factors)}
        found: list[tuple[str, Estimate | None, Estimate | None]] = []
        for name, contrast in self.design.contrasts.items():
            plain = robust = None
            if contrast.by is None or self.model.interactions:
                sides = {}
                for difference in contrast.differences:
                    index = self.design.factors[places[difference.factor]].levels.index
                    plus, minus = map(index, difference.plus), map(index, difference.minus)
                    sides[places[difference.factor]] = [*plus], [*minus]
                weights = self.model.difference(sides)[None]
                plain = self.least_squares.combine(weights)[0]
                robust = self.robust.combine(weights)[0] if self.robust else None
            found.append((name, plain, robust))
        if not found:
            return []
        # One that is not known yet counts all the same.
        adjusted = multipletests([plain.p if plain else 1 for _, plain, _ in found], method="holm")[1]
        return [Primary(*each, float(p)) for each, p in zip(found, adjusted, strict=True)]

    @cached_property
    def best(self) -> Levels:
        """The level of each factor that the additive model finds best."""
        sign = -1 if self.higher_is_better else 1
        terms, fit = self.main, self.additive
        return tuple(
            int(np.argmin(sign * terms.effects(place) @ fit.coefficients))
            for place in range(len(self.design.factors))
        )

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What the additive model predicts for the best combination and the design's schedules.

        Factors that a schedule does not state have their best level. The best is the lowest of many
        estimates, so its own is too good (the winner's curse)."""
        named = {"best": self.best}
        for name, stated in self.design.predict.items():
            named[name] = tuple(
                factor.levels.index(stated[factor.name]) if factor.name in stated else self.best[place]
                for place, factor in enumerate(self.design.factors)
            )
        return [self._predict(name, levels) for name, levels in named.items()]

    def _predict(self, name: str, levels: Levels) -> Prediction:
        estimate = self.additive.combine(self.main.row(levels)[None])[0]
        labels = tuple(
            factor.levels[level] for factor, level in zip(self.design.factors, levels, strict=True)
        )
        measured = [value for variant, _, value in self.data if self.design.rows[variant] == levels]
        return Prediction(name, labels, estimate, float(np.mean(measured)) if measured else None)

    @cached_property
    def fitted(self) -> dict[str, tuple[float, float]]:
        """By variant: the additive model's prediction, and the mean of its runs."""
        of_variant: dict[str, list[float]] = {}
        for variant, _, value in self.data:
            of_variant.setdefault(variant, []).append(value)
        terms, coefficients = self.main, self.additive.coefficients
        return {
            variant: (float(terms.row(self.design.rows[variant]) @ coefficients), float(np.mean(values)))
            for variant, values in of_variant.items()
        }
