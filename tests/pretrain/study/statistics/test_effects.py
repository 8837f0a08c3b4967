"""The analysis against numpy, scipy and planted effects."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from pretrain.study.planning import parse_study
from pretrain.study.statistics.effects import Effects
from pretrain.study.statistics.paired import fits_disagree
from tests.helpers.marks import slow

LAYERS = {f"heads[{layer}]": [2, 4, 8, 16] for layer in range(4)}


def study(method, runs, vary=None, **more):
    values = {"seeds": 1, "method": method, "runs": runs, "vary": vary or LAYERS, **more}
    return parse_study(yaml.safe_dump(values, sort_keys=False), "it", Path("runs/it"), check_runs=False)


def design(method, runs, vary=None):
    return study(method, runs, vary).design


def planted(found, seeds, noise, effects=None, block=0.05, extra=lambda levels: 0.0):
    """Values by variant and seed: effects of levels that add up, a block for each seed, and noise().

    Args:
        effects: by factor, of each level.
        extra: more, by the levels of a row.
    """
    effects = effects or [[0.0] * len(labels) for labels in found.levels.values()]
    values = {}
    for variant, row in found.rows.items():
        value = 4 + sum(by_level[level] for by_level, level in zip(effects, row, strict=True)) + extra(row)
        values[variant] = {seed: value + block * seed + noise() for seed in seeds}
    return values


def normal(seed, sd=0.01):
    generator = np.random.default_rng(seed)
    return lambda: float(generator.normal(scale=sd))


def reference(found, values, pairs=()):
    """Value, interval and p of every level's effect, from numpy's least squares with dummy variables of
    seeds, factors and *pairs* of factors."""
    counts = list(map(len, found.levels.values()))
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})

    def columns(levels, seed):
        dummies = [[float(own == at) for at in range(1, n)] for own, n in zip(levels, counts, strict=True)]
        products = [a * b for one, other in pairs for a in dummies[one] for b in dummies[other]]
        return [1.0, *(float(seed == at) for at in seeds[1:]), *itertools.chain(*dummies), *products]

    runs = [(name, seed, value) for name, by_seed in values.items() for seed, value in by_seed.items()]
    matrix = np.array([columns(found.rows[name], seed) for name, seed, _ in runs])
    y = [value for *_, value in runs]
    solved = np.linalg.lstsq(matrix, y, rcond=None)[0]
    degrees = len(y) - matrix.shape[1]
    covariance = np.sum((y - matrix @ solved) ** 2) / degrees * np.linalg.inv(matrix.T @ matrix)
    grid = np.array(list(itertools.product(*map(range, counts))))
    whole = np.array([columns(row, seeds[0]) for row in grid])
    for factor, count in enumerate(counts):
        for level in range(count):
            weights = whole[grid[:, factor] == level].mean(0) - whole.mean(0)
            value, error = weights @ solved, math.sqrt(weights @ covariance @ weights)
            half = stats.t.ppf(0.975, degrees) * error
            yield value, value - half, value + half, 2 * stats.t.sf(abs(value / error), degrees)


def numbers(effects):
    """The same of an analysis."""
    found = [line.least_squares for line in effects.levels]
    return [(each.value, each.low, each.high, each.p) for each in found]


@pytest.mark.parametrize("missing", [0, 3])
def test_effects_and_intervals_agree_with_numpy(missing):
    found = design("orthogonal", 16)
    values = planted(found, (1, 2, 3), normal(0), [[0.02, 0, -0.01, -0.01]] * 4)
    for variant in list(values)[:missing]:
        del values[variant][2]
    expected = list(reference(found, values))
    np.testing.assert_allclose(numbers(Effects(found, values)), expected, rtol=1e-9, atol=1e-10)


def test_interactions_are_seen_where_they_can_be():
    planted_one = {"extra": lambda row: 0.05 * (row[0] == 0 and row[3] == 0)}
    seen = Effects(*seeds_of(design("grid", 256), (1,), **planted_one))
    shares = {line["term"]: line for line in seen.variance}
    assert len(shares) == 4 + 6 + 1
    assert shares["heads[0]:heads[3]"]["p"] < 1e-6
    assert min(shares[term]["p"] for term in shares if ":" in term and term != "heads[0]:heads[3]") > 0.001
    unseen = Effects(*seeds_of(design("fractional", 64), (1,), **planted_one))
    assert [line["term"] for line in unseen.variance] == [*LAYERS, "error"]
    assert not unseen.interactions


@pytest.mark.parametrize(("finished", "seen"), [(256, True), (90, True), (88, False)])
def test_interactions_wait_until_the_runs_can_bear_them(finished, seen):
    """They take 67 columns, and a quarter of the runs is to be left for the error."""
    found, values = seeds_of(design("grid", 256), (1,))
    order = np.random.default_rng(0).permutation(list(values))[:finished]
    effects = Effects(found, {variant: values[variant] for variant in order})
    assert effects.interactions == seen


def seeds_of(found, seeds, noise=None, **options):
    return found, planted(found, seeds, noise or normal(3), **options)


def test_lack_of_fit_is_seen_against_the_spread_of_seeds():
    found = design("orthogonal", 16)
    fits = Effects(*seeds_of(found, (1, 2, 3)))
    assert [line["term"] for line in fits.variance] == ["seeds", *LAYERS, "error"]
    f, p = fits.lack_of_fit
    assert p == pytest.approx(stats.f.sf(f, 3, 30)) and p > 0.01
    bent = Effects(*seeds_of(found, (1, 2, 3), extra=lambda row: 0.1 * (sum(row) == 6)))
    assert bent.lack_of_fit[1] < 1e-6
    assert Effects(*seeds_of(found, (1,))).lack_of_fit is None


def test_one_run_far_off_moves_the_robust_fit_less():
    found = design("fractional", 64)
    values = planted(found, (1,), normal(4))
    values[next(name for name in values if name.startswith("2."))][1] += 1.0
    effects = Effects(found, values)
    first = next(line for line in effects.levels if (line.factor, line.level) == ("heads[0]", "2"))
    assert first.least_squares.value > 0.03
    assert abs(first.robust.value) < 0.006
    # Huber's condition holds at the fit: residuals cut at 1.345 scales are orthogonal to the columns.
    assert fits_disagree(first.least_squares, first.robust)
    matrix, residuals, scale = effects.robust.model.exog, effects.robust.resid, effects.robust.scale
    assert np.abs(matrix.T @ np.clip(residuals / scale, -1.345, 1.345)).max() < 1e-3


def test_a_run_far_worse_than_the_robust_fit_is_an_outlier():
    found = design("orthogonal", 16)
    for sign, higher in ((1, False), (-1, True)):
        values = planted(found, (1, 2, 3), normal(5))
        name = list(values)[3]
        values[name][3] += 0.2 * sign
        assert Effects(found, values, higher_is_better=higher).outliers == [(name, 3)]
        assert Effects(found, values, higher_is_better=not higher).outliers == []


def test_a_contrast_of_two_factors_is_a_difference_of_differences():
    """By hand from the means of the cells."""
    vary = {"heads[0]": [2, 4, 8], "heads[1]": [2, 4], "optimizer.learning_rate": [1e-3, 2e-3, 4e-3]}
    late, early = (f"heads[0]={{}}.optimizer.learning_rate={rate}".format for rate in ("4e-3", "0.001"))
    contrasts = {
        "by rate": f"({late(2)} - mean({late(4)}, {late(8)})) - ({early(2)} - mean({early(4)}, {early(8)}))",
        "alone": "heads[1]=2 - heads[1]=4",
    }
    own = study("grid", None, vary, contrasts=contrasts)
    found = own.design
    steep = planted(found, (1, 2), normal(8, 1e-3), extra=lambda row: 0.1 * (row[0] == 0) * (row[2] == 2))
    effects = Effects(found, steep)

    def mean(**fixed):
        rows = [v for v, row in found.rows.items() if all(row[int(k[1])] == at for k, at in fixed.items())]
        return np.mean([list(steep[variant].values()) for variant in rows])

    by_rate, alone = (effects.contrast(each) for each in own.contrasts)
    at = {rate: mean(f0=0, f2=rate) - (mean(f0=1, f2=rate) + mean(f0=2, f2=rate)) / 2 for rate in (0, 2)}
    assert by_rate[0].value == pytest.approx(at[2] - at[0], abs=1e-12)
    assert by_rate[0].value == pytest.approx(0.1, abs=2e-3)
    assert by_rate[1].value == pytest.approx(0.1, abs=2e-3)
    assert alone[0].value == pytest.approx(mean(f1=0) - mean(f1=1), abs=1e-12)
    # Of each seed's 18 runs two have 2 heads and a given rate, and four have 4 or 8.
    error = math.sqrt(effects.least_squares.scale * 2 * (1 / 4 + 1 / 8))
    width = by_rate[0].high - by_rate[0].low
    assert width == pytest.approx(2 * stats.t.ppf(0.975, effects.least_squares.df_resid) * error)

    few = Effects(found, {v: steep[v] for v in list(steep)[:9]})
    assert few.contrast(own.contrasts[0]) is None and few.contrast(own.contrasts[1]) is not None


def test_the_best_and_stated_schedules_are_predicted():
    found = study("fractional", 64, predict={"rising": "2,4,8,16"}).design
    of_layers = [[0.03, 0.02, 0.01, 0], [0, 0.01, 0.02, 0.03], [0.02, 0, 0.02, 0.02], [0.01, 0.01, 0, 0.01]]
    effects = Effects(found, planted(found, (1, 2), normal(6, 1e-4), of_layers))
    best, rising = effects.predictions
    assert best.levels == ("16", "2", "4", "8")
    assert best.estimate.value == pytest.approx(4.075, abs=1e-3)  # blocks of 0.05 and 0.10
    assert rising.estimate.value == pytest.approx(4.075 + 0.03 + 0.01 + 0.02 + 0.01, abs=1e-3)
    assert rising.estimate.low < rising.estimate.value < rising.estimate.high
    for each in effects.predictions:
        own = effects.values.get(".".join(each.levels))
        assert each.measured == (pytest.approx(np.mean(list(own.values()))) if own else None)
    higher = Effects(found, effects.values, higher_is_better=True)
    assert higher.predictions[0].levels[:2] == ("2", "16")


def test_too_few_runs_are_said():
    found = design("orthogonal", 16)
    values = planted(found, (1,), normal(7))
    assert Effects(found, values).unknown == ""
    fewer = dict(list(values.items())[:13])
    assert "13 finished runs for 13 coefficients" in Effects(found, fewer).unknown
    no_two = {v: by_level for v, by_level in planted(found, (1, 2), normal(7)).items() if found.rows[v][0]}
    assert Effects(found, no_two).unknown == "the finished runs do not determine the effects of heads[0]"
    assert Effects(found, {}).unknown == "no run is finished"
    values[next(iter(values))][1] = math.nan
    assert len(Effects(found, values).data) == 15


@pytest.mark.parametrize("seed", [0, 1, *slow(range(2, 8))])
@pytest.mark.parametrize(
    "choice", [[0.98], [0.98] * 30 + [0.97], [0.97, *[0.98] * 4, 0.99]], ids=["1", "2", "3"]
)
def test_ties_name_no_run_and_break_nothing(choice, seed):
    """Results of few values, such as accuracies on few examples."""
    found = design("grid", None, {f"heads[{layer}]": [2, 4] for layer in range(4)})
    draw = np.random.default_rng(seed).choice
    values = {name: {seed: float(draw(choice)) for seed in (1, 2, 3)} for name in found.rows}
    effects = Effects(found, values, higher_is_better=True)
    assert effects.outliers == []
    assert len(effects.levels) == 8 and len(effects.variance) >= 5 and effects.predictions
