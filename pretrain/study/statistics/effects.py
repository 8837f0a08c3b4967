"""What a study without a baseline shows: effects of levels, shares of the variance, and predicted schedules.

Linear models in statsmodels' formulas, every factor coded so that the effects of its levels add up to zero,
with the seeds as blocks; by least squares and by Huber's M-estimate.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
from numpy.typing import NDArray
from patsy import dmatrix
from statsmodels.formula.api import ols, rlm
from statsmodels.stats.anova import anova_lm

from pretrain.study.formulas import Contrast
from pretrain.study.planned import Design
from pretrain.study.statistics.paired import CONFIDENCE, FAR, Estimate

FEWEST_DEGREES = 5
"""Interactions are in the model if so many degrees of freedom are left for the error, and LEFT_OVER."""
LEFT_OVER = 0.25
"""Of the runs: a model with nearly as many columns as runs fits their noise."""
MOST_ITERATIONS = 200
"""Of reweighted least squares."""
SEEDS = "seed"

Matrix = NDArray[np.float64]
Levels = tuple[int, ...]
"""Of each factor, from 0."""


@dataclass(frozen=True)
class LevelEffect:
    """How a level of a factor differs from the mean of the factor's levels."""

    factor: str
    level: str
    runs: int
    least_squares: Estimate
    robust: Estimate | None
    """None where the fit did not converge, or left no error."""


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
    """The analysis of the finished runs of a study without a baseline.

    Args:
        values: the result by variant and seed.
        higher_is_better: of the measure.
    """

    design: Design
    values: Mapping[str, Mapping[int, float]]
    higher_is_better: bool = False

    @property
    def _runs(self) -> list[tuple[str, int, float]]:
        return [(name, seed, value) for name, by in self.values.items() for seed, value in by.items()]

    @cached_property
    def data(self) -> pd.DataFrame:
        """A row for each finite result: variant, seed, value, and the level of each factor as f0, f1, …"""
        columns = pd.DataFrame(self._runs, columns=["variant", SEEDS, "value"])
        columns = columns[np.isfinite(columns.value.astype(float))].astype({SEEDS: "category"})
        return self._frame([self.design.rows[variant] for variant in columns.variant], columns)

    def _frame(self, rows: Sequence[Levels], columns: pd.DataFrame) -> pd.DataFrame:
        """The columns with a categorical one for each factor, which has all levels of the study."""
        factors = {
            f"f{place}": pd.Categorical([row[place] for row in rows], categories=range(len(labels)))
            for place, labels in enumerate(self.design.levels.values())
        }
        return columns.assign(**factors)

    @property
    def seeds(self) -> list[int]:
        """Those that have a finite value."""
        return list(self.data[SEEDS].cat.categories)

    # ------------------------------------------------------------------ models

    def formula(self, interactions: bool) -> str:
        """The right side of the model, with or without interactions of two factors."""
        factors = [f"C(f{place}, Sum)" for place in range(len(self.design.levels))]
        pairs = map(":".join, itertools.combinations(factors, 2)) if interactions else ()
        seeds = [f"C({SEEDS}, Sum)"] if len(self.seeds) > 1 else []
        return " + ".join([*seeds, *factors, *pairs])

    def grid(self, formula: str, rows: Sequence[Levels] | NDArray[np.int64]) -> Matrix:
        """The columns of combinations, for the mean of the seeds: (rows, width)."""
        seeds = self.seeds
        columns = pd.DataFrame({SEEDS: pd.Categorical(seeds * len(rows), categories=seeds)})
        matrix = np.asarray(dmatrix(formula, self._frame([row for row in rows for _ in seeds], columns)))
        return matrix.reshape(len(rows), len(seeds), -1).mean(axis=1)

    @cached_property
    def unknown(self) -> str:
        """Why there is no analysis; empty if there is."""
        if self.data.empty:
            return "no run is finished"
        matrix = dmatrix(self.formula(False), self.data)
        width = matrix.shape[1]
        if len(matrix) < width + 1:
            return f"{len(matrix)} finished runs for {width} coefficients; at least one more is needed"
        rank = np.linalg.matrix_rank(matrix)
        if rank == width:
            return ""
        found = []
        for name, place in matrix.design_info.term_name_slices.items():
            without = np.linalg.matrix_rank(np.delete(matrix, place, axis=1))
            if name != "Intercept" and rank - without < place.stop - place.start:
                found.append(self.name_term(name))
        return f"the finished runs do not determine the effects of {', '.join(found)}"

    @cached_property
    def interactions(self) -> bool:
        """Whether interactions of two factors are in the model: where they can be estimated."""
        matrix = dmatrix(self.formula(True), self.data)
        runs, width = matrix.shape
        enough = runs - width >= max(FEWEST_DEGREES, LEFT_OVER * runs)
        return bool(enough and np.linalg.matrix_rank(matrix) == width)

    @cached_property
    def model(self) -> str:
        """The right side of the model that is fitted."""
        return self.formula(self.interactions)

    @cached_property
    def least_squares(self) -> Any:
        """The model by least squares."""
        return ols(f"value ~ {self.model}", self.data).fit()

    @cached_property
    def additive(self) -> Any:
        """The model without interactions, which predicts."""
        return ols(f"value ~ {self.formula(False)}", self.data).fit()

    @cached_property
    def robust(self) -> Any | None:
        """The model by Huber's M-estimate with c = 1.345; None if it does not converge, as where nothing is
        left for the error.

        The scale is Huber's proposal 2 and the covariance his second one (Huber, Robust Statistics, 1981):
        they count the degrees of freedom. The usual scale, the median absolute deviation, does not, and with
        two coefficients for five runs its intervals are too narrow.
        """
        model = rlm(f"value ~ {self.model}", self.data, M=sm.robust.norms.HuberT())
        try:
            with np.errstate(divide="ignore", invalid="ignore"):
                fit = model.fit(maxiter=MOST_ITERATIONS, scale_est=sm.robust.scale.HuberScale(), cov="H2")
        except ValueError:  # nearly all values are ties: a scale of zero makes weights that are not numbers
            return None
        converged = fit.fit_history["iteration"] < MOST_ITERATIONS
        return fit if converged and fit.scale > 0 and np.isfinite(fit.cov_params()).all(axis=None) else None

    # ------------------------------------------------------------------ what they show

    @cached_property
    def outliers(self) -> list[tuple[str, int]]:
        """Variant and seed of the runs that are worse than the robust fit by more than FAR of its standard
        deviations, and of those that are not finite."""
        found = []
        if not self.unknown and self.robust is not None:
            sign = -1 if self.higher_is_better else 1
            # The median absolute residual is as good as 0 where most values are ties; this scale is not.
            worse = self.data[sign * self.robust.resid > FAR * self.robust.scale]
            found = list(zip(worse.variant, map(int, worse[SEEDS]), strict=True))
        return found + [(variant, seed) for variant, seed, value in self._runs if not math.isfinite(value)]

    @cached_property
    def levels(self) -> list[LevelEffect]:
        """The effect of every level of every factor."""
        rows = np.array(list(self.design.rows.values()))
        grid, found, weights = self.grid(self.model, rows), [], []
        for place, (factor, labels) in enumerate(self.design.levels.items()):
            for level, label in enumerate(labels):
                found.append((factor, label, int((self.data[f"f{place}"] == level).sum())))
                weights.append(grid[rows[:, place] == level].mean(axis=0) - grid.mean(axis=0))
        fits = estimate(self.least_squares, np.array(weights)), estimate(self.robust, np.array(weights))
        return [LevelEffect(*each, *both) for each, *both in zip(found, *fits, strict=True)]

    @cached_property
    def variance(self) -> list[dict[str, Any]]:
        """The analysis of variance: each term's sum of squares given all others (of type III), and the error,
        whose F and p are None.

        With all runs of a balanced array these add up to that of the values."""
        table = anova_lm(self.least_squares, typ=3).drop(index="Intercept")
        found = {"degrees": table.df.astype(int), "share": table.sum_sq / table.sum_sq.sum(), "f": table.F}
        frame = pd.DataFrame({"term": map(self.name_term, table.index)} | found | {"p": table["PR(>F)"]})
        return frame.astype(object).where(frame.notna(), None).to_dict("records")

    def name_term(self, term: str) -> str:
        """A term's name for readers: seeds, a factor, two factors with a colon, or error."""
        names = {f"f{place}": name for place, name in enumerate(self.design.levels)}
        names |= {SEEDS: "seeds", "Residual": "error"}
        parts = [re.sub(r"C\((\w+), Sum\)", r"\1", part) for part in term.split(":")]
        return ":".join(names.get(part, part) for part in parts)

    @cached_property
    def lack_of_fit(self) -> tuple[float, float] | None:
        """F and p of what combinations differ in beyond the model, against how a combination's runs differ.

        None with one seed, or if the model leaves nothing over."""
        if len(self.seeds) < 2:
            return None
        saturated = ols(f"value ~ C(variant) + C({SEEDS})", self.data).fit()
        if saturated.df_resid < 1 or self.least_squares.df_resid <= saturated.df_resid:
            return None
        f, p, _ = saturated.compare_f_test(self.least_squares)
        return float(f), float(p)

    def contrast(self, contrast: Contrast) -> tuple[Estimate, Estimate | None] | None:
        """A contrast by least squares and by the robust fit; None for one of an interaction, where
        interactions are not in the model."""
        if contrast.order > 1 and not self.interactions:
            return None
        rows = [self.design.rows[variant] for variant in contrast.weights]
        weights = np.array(list(contrast.weights.values())) @ self.grid(self.model, rows)
        return estimate(self.least_squares, weights)[0], estimate(self.robust, weights)[0]

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What the additive model predicts for the best combination and the study's schedules.

        Factors that a schedule does not state have their best level. The best is the lowest of many
        estimates, so its own is too good (the winner's curse)."""
        labels, rows = self.design.levels, pd.DataFrame(self.design.rows.values())
        means = self.grid(self.formula(False), rows.to_numpy()) @ self.additive.params.to_numpy()
        sign = -1 if self.higher_is_better else 1
        best = {
            factor: each[(sign * pd.Series(means)).groupby(rows[place]).mean().idxmin()]
            for place, (factor, each) in enumerate(labels.items())
        }
        named = {name: {**best, **stated} for name, stated in {"best": {}, **self.design.predict}.items()}
        chosen = [[labels[factor].index(each) for factor, each in own.items()] for own in named.values()]
        found = []
        estimates = estimate(self.additive, self.grid(self.formula(False), np.array(chosen)))
        for (name, own), each in zip(named.items(), estimates, strict=True):
            measured = self.data.value[self.data.variant == ".".join(own.values())]
            mean = float(measured.mean()) if len(measured) else None
            found.append(Prediction(name, tuple(own.values()), each, mean))
        return found


def estimate(fit: Any | None, weights: Matrix) -> list[Any]:
    """Combinations of a fit's coefficients, (combinations, width) or (width,), with t-intervals by the
    error's degrees of freedom; each None without a fit."""
    if fit is None:
        return [None] * len(np.atleast_2d(weights))
    with np.errstate(divide="ignore", invalid="ignore"):
        table = fit.t_test(np.atleast_2d(weights), use_t=True).summary_frame(alpha=1 - CONFIDENCE)
    columns = ["coef", "Conf. Int. Low", "Conf. Int. Upp.", "P>|t|"]
    return [Estimate(*map(float, row)) for row in table[columns].to_numpy()]
