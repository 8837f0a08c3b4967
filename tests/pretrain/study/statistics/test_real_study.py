"""The analysis of map-small's 256 runs against numpy: other columns, and means of what they predict."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pretrain.study.file import find_study
from pretrain.study.planning import read_study
from pretrain.study.statistics.effects import Effects

LOSSES = Path(__file__).with_name("map-small.json")
"""Final validation losses by variant, as docs/log/map.md reports them."""
LEVELS = 4
FACTORS = 5
PAIRS = list(itertools.combinations(range(FACTORS), 2))


def of_map_small():
    """The study, and the analysis of its 256 runs."""
    study = read_study(find_study("map-small"), check_runs=False)
    losses = json.loads(LOSSES.read_text())
    values = {name: {301: losses["-".join(each.levels)]} for name, each in study.variants.items()}
    return study, Effects(study.design, values)


@pytest.fixture(scope="module")
def effects():
    return of_map_small()[1]


def columns(levels):
    """Dummies against the first levels, and their products: 1 + 5 x 3 + 10 x 9 columns."""
    dummies = [[float(level == other) for other in range(1, LEVELS)] for level in levels]
    products = [a * b for one, other in PAIRS for a in dummies[one] for b in dummies[other]]
    return [1.0, *itertools.chain(*dummies), *products]


@pytest.fixture(scope="module")
def fitted(effects):
    """Coefficients, their covariance and the error's degrees of freedom."""
    rows = np.array([columns(effects.design.rows[variant]) for variant in effects.values])
    losses = np.array([by_seed[301] for by_seed in effects.values.values()])
    coefficients = np.linalg.lstsq(rows, losses, rcond=None)[0]
    degrees = len(losses) - rows.shape[1]
    variance = np.sum((losses - rows @ coefficients) ** 2) / degrees
    return coefficients, variance * np.linalg.inv(rows.T @ rows), degrees


@pytest.fixture(scope="module")
def means():
    """Weights whose product with the coefficients is the mean loss at a factor's level, over all 1,024
    combinations: (factors, levels, columns)."""
    grid = list(itertools.product(range(LEVELS), repeat=FACTORS))
    rows = np.array([columns(levels) for levels in grid])
    chosen = np.array(grid)
    return np.array(
        [[rows[chosen[:, factor] == level].mean(0) for level in range(LEVELS)] for factor in range(FACTORS)]
    )


def interval(weights, fitted):
    coefficients, covariance, degrees = fitted
    value, error = weights @ coefficients, math.sqrt(weights @ covariance @ weights)
    quantile = stats.t.ppf(0.975, degrees)
    return (
        value,
        value - quantile * error,
        value + quantile * error,
        2 * stats.t.sf(abs(value / error), degrees),
    )


def numbers(estimate):
    return estimate.value, estimate.low, estimate.high, estimate.p


def test_every_effect_agrees_with_numpy(effects, fitted, means):
    assert len(effects.values) == 256
    assert len(effects.levels) == FACTORS * LEVELS
    for place, line in enumerate(effects.levels):
        factor, level = divmod(place, LEVELS)
        expected = interval(means[factor, level] - means[factor].mean(0), fitted)
        assert numbers(line.least_squares) == pytest.approx(expected, abs=1e-10)


def test_every_contrast_agrees_with_numpy(effects, fitted, means):
    study, _ = of_map_small()
    for contrast, layer in zip(study.contrasts, (3, 2, 0), strict=True):
        expected = interval(means[layer, 0] - means[layer, 1:].mean(0), fitted)  # 2 heads less 4, 8 and 16
        assert numbers(effects.contrast(contrast)[0]) == pytest.approx(expected, abs=1e-10)


def test_every_share_of_the_variance_is_one_of_squared_differences_of_means(effects):
    """In a balanced array of strength 4 the sums of squares are those of means, without any model."""
    rows = np.array([effects.design.rows[variant] for variant in effects.values])
    losses = np.array([by_seed[301] for by_seed in effects.values.values()])
    total, mean = np.sum((losses - losses.mean()) ** 2), losses.mean()
    shares = {line["term"]: line["share"] for line in effects.variance}
    names = list(effects.design.levels)
    of_factor = [
        [losses[rows[:, factor] == level].mean() for level in range(LEVELS)] for factor in range(FACTORS)
    ]
    for factor, name in enumerate(names):
        squares = 64 * np.sum((np.array(of_factor[factor]) - mean) ** 2)
        assert shares[name] == pytest.approx(squares / total, abs=1e-10)
    for one, other in PAIRS:
        squares = sum(
            16 * (cell - of_factor[one][a] - of_factor[other][b] + mean) ** 2
            for a, b in itertools.product(range(LEVELS), repeat=2)
            for cell in [losses[(rows[:, one] == a) & (rows[:, other] == b)].mean()]
        )
        assert shares[f"{names[one]}:{names[other]}"] == pytest.approx(squares / total, abs=1e-10)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-10)
