"""Do the intervals of designs cover what was planted? Simulated studies, with normal noise and with that of
the 256 runs of map-small; ``-s`` prints what was found."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from pretrain.study.design.effects import Effects
from pretrain.study.statistics.linear_model import Fit
from tests.pretrain.study.design.test_effects import design, normal, planted
from tests.pretrain.study.design.test_real_study import of_map_small

SD = 0.01


@pytest.fixture(scope="module")
def seen():
    """What the robust fit of map-small leaves unexplained: 256 values, one of them at +0.18."""
    effects = of_map_small()
    residuals = effects.response - effects.matrix(effects.model) @ effects.robust.coefficients
    return residuals - residuals.mean()


def a_design(tmp_path, kind):
    if kind == "map-small":
        return of_map_small().design
    return design(tmp_path, kind, 64 if kind == "fractional" else 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "coefficients"), [("fractional", 13), ("full", 67), ("map-small", 106)], ids=str
)
def test_every_interval_covers_what_was_planted_in_95_of_100(tmp_path, seen, kind, coefficients):
    """Of each level of each factor; with interactions where the design can estimate them."""
    found = a_design(tmp_path, kind)
    made = Effects(found, planted(found, (1,), normal(0)))
    matrix, terms = made.matrix(made.model), made.model
    assert terms.width == coefficients
    generator = np.random.default_rng(11)
    truth = generator.normal(scale=0.02, size=terms.width)
    weights = np.vstack([terms.effects(factor) for factor in range(len(found.factors))])
    expected = weights @ truth
    noises = {
        "normal": lambda: generator.normal(scale=SD, size=len(matrix)),
        "seen": lambda: generator.choice(seen, len(matrix)),
    }
    for noise, draw in noises.items():
        for fit, studies in ((Fit.least_squares, 2000), (Fit.robust, 150)):
            fits = [fit(matrix, matrix @ truth + draw()).combine(weights) for _ in range(studies)]
            low = np.array([[each.low for each in estimates] for estimates in fits])
            high = np.array([[each.high for each in estimates] for estimates in fits])
            covered = ((low <= expected) & (expected <= high)).mean(axis=0)
            print(
                f"{kind}, {noise} noise, {fit.__name__}: {covered.mean():.1%}, by level "
                f"{covered.min():.1%} to {covered.max():.1%}; mean width {(high - low).mean():.4f}"
            )
            assert covered.mean() == pytest.approx(0.95, abs=0.015)
            if studies == 2000:
                assert covered == pytest.approx(0.95, abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["normal", "seen"])
def test_primary_contrasts_of_nothing_are_rarely_found(tmp_path, seen, noise):
    """With Holm's adjustment of three, by both fits."""
    contrasts = {f"layer {n}": {"factor": f"layer_{n}", "plus": 2, "minus": 16} for n in (0, 1, 3)}
    found = design(tmp_path, "fractional", 64, contrasts=contrasts)
    generator = np.random.default_rng(12)
    draw = normal(12) if noise == "normal" else lambda: float(generator.choice(seen))
    studies, errors = 2000, {"least squares": 0, "Huber": 0}
    gc.freeze()  # multipletests collects garbage every time
    for study in range(studies):
        primary = Effects(found, planted(found, (1,), draw)).primary
        errors["least squares"] += any(each.adjusted < 0.05 for each in primary)
        if study < 400:
            ps = [each.robust.p for each in primary]
            errors["Huber"] += multipletests(ps, method="holm")[1].min() < 0.05
    gc.unfreeze()
    shares = {"least squares": errors["least squares"] / studies, "Huber": errors["Huber"] / 400}
    print(
        f"{noise} noise, found though nothing differs: "
        + ", ".join(f"{fit} {share:.1%}" for fit, share in shares.items())
    )
    assert shares["least squares"] <= 0.06
