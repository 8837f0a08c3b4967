"""Do the intervals of designs cover what was planted? Simulated studies, with normal noise and with that of
the 256 runs of map-small; ``-s`` prints what was found."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm

from pretrain.study.statistics.effects import Effects, estimate
from tests.pretrain.study.statistics.test_effects import normal, planted, study
from tests.pretrain.study.statistics.test_real_study import of_map_small

SD = 0.01


@pytest.fixture(scope="module")
def seen():
    """What the robust fit of map-small leaves unexplained: 256 values, one of them at +0.18."""
    residuals = np.asarray(of_map_small()[1].robust.resid)
    return residuals - residuals.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "coefficients"), [("fractional", 13), ("grid", 67), ("map-small", 106)], ids=str
)
def test_every_interval_covers_what_was_planted_in_95_of_100(seen, kind, coefficients):
    """Of each level of each factor; with interactions where the study can estimate them."""
    runs = 64 if kind == "fractional" else None
    found = of_map_small()[0].design if kind == "map-small" else study(kind, runs).design
    made = Effects(found, planted(found, (1,), normal(0)))
    rows = np.array(list(found.rows.values()))
    matrix = made.least_squares.model.exog
    assert matrix.shape[1] == coefficients
    grid = made.grid(made.model, list(found.rows.values()))
    places = [(at, level) for at, labels in enumerate(found.levels.values()) for level in range(len(labels))]
    weights = np.array([grid[rows[:, at] == level].mean(0) - grid.mean(0) for at, level in places])
    generator = np.random.default_rng(11)
    truth = generator.normal(scale=0.02, size=coefficients)
    noises = {
        "normal": lambda: generator.normal(scale=SD, size=len(matrix)),
        "seen": lambda: generator.choice(seen, len(matrix)),
    }
    for noise, draw in noises.items():
        for name, fit, studies in (("least squares", _least_squares, 400), ("Huber's", _robust, 40)):
            covered = np.zeros(len(weights))
            for _ in range(studies):
                estimates = estimate(fit(matrix @ truth + draw(), matrix), weights)
                expected = weights @ truth
                covered += [each.low <= at <= each.high for each, at in zip(estimates, expected, strict=True)]
            print(f"{kind}, {noise} noise, {name}: {covered.mean() / studies:.1%}")
            assert covered.mean() / studies == pytest.approx(0.95, abs=0.025)


def _least_squares(values, matrix):
    return sm.OLS(values, matrix).fit()


def _robust(values, matrix):
    """As Effects.robust."""
    model = sm.RLM(values, matrix, M=sm.robust.norms.HuberT())
    return model.fit(maxiter=200, scale_est=sm.robust.scale.HuberScale(), cov="H2")
