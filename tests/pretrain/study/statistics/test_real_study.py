"""The analysis of real studies against numpy: other columns, and means of what they predict."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from pretrain.study.archive import read_archive
from pretrain.study.file import find_study
from pretrain.study.planning import read_study
from pretrain.study.results import load_results
from pretrain.study.statistics.effects import Effects
from pretrain.study.summaries import build_view
from tests.helpers.launch import ROOT
from tests.pretrain.study.statistics.test_effects import numbers, reference

LOSSES = Path(__file__).with_name("map-small.json")
"""Final validation losses by variant, as docs/log/map.md reports them."""
LEVELS = 4


def of_map_small():
    """The study, and the analysis of its 256 runs."""
    study = read_study(find_study("map-small"), check_runs=False)
    losses = json.loads(LOSSES.read_text())
    values = {name: {301: losses["-".join(each.levels)]} for name, each in study.variants.items()}
    return study, Effects(study.design, values)


@pytest.fixture(scope="module")
def effects():
    return of_map_small()[1]


@pytest.mark.parametrize("name", ["map-small", "tokens-small", "map_muon-small"])
def test_every_effect_agrees_with_numpy(effects, name):
    if name != "map-small":
        study = read_archive(ROOT / f"results/{name}.json")
        effects = build_view(study, load_results(study)).effects
    pairs = itertools.combinations(range(len(effects.design.levels)), 2) if effects.interactions else ()
    expected = list(reference(effects.design, effects.values, list(pairs)))
    assert effects.interactions == (name != "map_muon-small")
    np.testing.assert_allclose(numbers(effects), expected, rtol=0, atol=1e-10)


def test_every_contrast_is_one_of_level_effects(effects):
    at = {(each.factor, each.level): each.least_squares.value for each in effects.levels}
    for contrast, layer in zip(of_map_small()[0].contrasts, (3, 2, 0), strict=True):
        few, *others = (at[f"heads[{layer}]", level] for level in ("2", "4", "8", "16"))
        assert effects.contrast(contrast)[0].value == pytest.approx(few - np.mean(others), abs=1e-10)


def test_every_share_of_the_variance_is_one_of_squared_differences_of_means(effects):
    """In a balanced array of strength 4 the sums of squares are those of means, without any model."""
    rows = np.array([effects.design.rows[variant] for variant in effects.values])
    losses = np.array([by_seed[301] for by_seed in effects.values.values()])
    total, mean = np.sum((losses - losses.mean()) ** 2), losses.mean()
    shares = {line["term"]: line["share"] for line in effects.variance}
    for name, column in zip(effects.design.levels, rows.T, strict=True):
        squares = sum(64 * (losses[column == level].mean() - mean) ** 2 for level in range(LEVELS))
        assert shares[name] == pytest.approx(squares / total, abs=1e-10)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-10)
