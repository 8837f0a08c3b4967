"""Do the intervals of designs cover what was planted? Simulated studies."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm

from pretrain.study.statistics.effects import Effects, estimate
from tests.pretrain.study.statistics.test_effects import normal, planted, study

SD = 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "coefficients"), [("fractional", 13), ("grid", 67)], ids=str)
def test_every_interval_covers_what_was_planted_in_95_of_100(kind, coefficients):
    """Of each level of each factor; with interactions where the study can estimate them."""
    found = study(kind, 64 if kind == "fractional" else None).design
    made = Effects(found, planted(found, (1,), normal(0)))
    rows = np.array(list(found.rows.values()))
    matrix = made.least_squares.model.exog
    assert matrix.shape[1] == coefficients
    grid = made.grid(made.model, list(found.rows.values()))
    places = [(at, level) for at, labels in enumerate(found.levels.values()) for level in range(len(labels))]
    weights = np.array([grid[rows[:, at] == level].mean(0) - grid.mean(0) for at, level in places])
    generator = np.random.default_rng(11)
    truth = generator.normal(scale=0.02, size=coefficients)
    for fit, studies in ((_least_squares, 400), (_robust, 40)):
        covered = np.zeros(len(weights))
        for _ in range(studies):
            values = matrix @ truth + generator.normal(scale=SD, size=len(matrix))
            estimates = estimate(fit(values, matrix), weights)
            covered += [
                each.low <= at <= each.high for each, at in zip(estimates, weights @ truth, strict=True)
            ]
        assert covered.mean() / studies == pytest.approx(0.95, abs=0.025)


def _least_squares(values, matrix):
    return sm.OLS(values, matrix).fit()


def _robust(values, matrix):
    """As Effects.robust."""
    model = sm.RLM(values, matrix, M=sm.robust.norms.HuberT())
    return model.fit(maxiter=200, scale_est=sm.robust.scale.HuberScale(), cov="H2")
