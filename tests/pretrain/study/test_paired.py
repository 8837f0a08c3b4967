"""Pairs of a study's runs, and how often their intervals cover the truth in many planted studies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pretrain.study.paired import baseline_of, in_common, paired_differences
from pretrain.study.results import RunResult
from pretrain.study.statistics import paired_interval
from pretrain.study.study_file import parse_study


def planted(seeds):
    """A study of two variants and one with other seeds, in which nothing has been run."""
    text = """
recipe: micro
settings: {steps: 20}
baseline: uniform
variants: {uniform: {heads: 8x4}, prism: {}, again: {heads: 8x4, seed_shift: 1000}}
"""
    return parse_study(f"seeds: {seeds}\n{text}", "planted", Path("runs/planted"))


def results_of(study, loss):
    """Every run finished with two validations, the last with the loss that *loss* gives it."""
    return [
        RunResult(
            planned,
            Path(planned.name),
            "finished",
            [
                {"step": 10, "tokens": 100, "val_loss": 9.0},
                {"step": 20, "tokens": 200, "val_loss": loss(planned)},
            ],
        )
        for planned in study.runs
    ]


@pytest.mark.parametrize(("seeds", "truth"), [(3, 0.0), (6, 0.0), (3, 0.02), (6, 0.02)])
def test_intervals_cover_the_truth_95_times_in_100(seeds, truth):
    """2,000 studies, with noise that a seed's runs share and that is much larger than what is their own."""
    study = planted(seeds)
    generator = np.random.default_rng(seeds)
    comparison = study.comparisons[0]
    covered = {"prism": 0, "again": 0}
    for _ in range(2000):
        common = {seed + shift: generator.normal(0, 0.5) for seed in study.seeds for shift in (0, 1000)}

        def loss(planned, common=common):
            effect = 0.0 if planned.variant == "uniform" else truth
            return 4.0 + common[planned.run.seed] + effect + generator.normal(0, 0.01)

        results = results_of(study, loss)
        for variant in covered:
            differences = paired_differences(results, comparison, variant, "val_loss", 1)
            interval = paired_interval(list(differences.values()))
            covered[variant] += interval.low <= truth <= interval.high
            assert interval.count == seeds
            if variant == "prism":
                assert interval.sd < 0.1, "the common noise cancels"
    for variant, count in covered.items():
        assert count / 2000 == pytest.approx(0.95, abs=0.015), variant


def test_only_finished_runs_of_one_seed_are_paired():
    study = planted(3)
    found = results_of(study, lambda planned: planned.seed + (0.25 if planned.variant == "prism" else 0.0))
    comparison = study.comparisons[0]
    assert paired_differences(found, comparison, "prism", "val_loss", 1) == {1: 0.25, 2: 0.25, 3: 0.25}
    assert paired_differences(found, comparison, "prism", "val_loss", 2) == {1: 0.125, 2: 0.125, 3: 0.125}
    assert paired_differences(found, comparison, "prism", "val_loss", 3) == {}
    assert paired_differences(found, comparison, "prism", "val_bpb", 1) == {}
    states = {"uniform-s1": "unfinished", "prism-s3": "failed"}
    partly = [
        RunResult(run.planned, run.folder, states.get(run.planned.name, run.state), run.rows) for run in found
    ]
    assert paired_differences(partly, comparison, "prism", "val_loss", 1) == {2: 0.25}
    others = [
        run for run in found if (run.variant, run.seed) not in {("uniform", 1), ("prism", 2), ("prism", 3)}
    ]
    assert paired_differences(others, comparison, "prism", "val_loss", 1) == {}


def test_a_variant_may_name_what_it_is_compared_with():
    study = parse_study(
        """
recipe: micro
settings: {steps: 20}
seeds: 2
baseline: a
variants: {a: {heads: 8x4}, b: {heads: 4x4}, c: {heads: 2x4, against: b}}
""",
        "against",
        Path("runs/against"),
    )
    found = results_of(study, lambda planned: {"a": 1.0, "b": 3.0, "c": 3.5}[planned.variant])
    comparison = study.comparisons[0]
    assert paired_differences(found, comparison, "c", "val_loss", 1) == {1: 0.5, 2: 0.5}
    assert paired_differences(found, comparison, "b", "val_loss", 1) == {1: 2.0, 2: 2.0}
    assert {run.variant for run in baseline_of(found, comparison).values()} == {"a"}
    assert {run.variant for run in baseline_of(found, comparison, "c").values()} == {"b"}


def test_pairs_of_other_seeds_are_known():
    study = planted(2)
    results = results_of(study, lambda planned: 1.0)
    runs = {
        variant: {run.seed: run for run in results if run.variant == variant}
        for variant in ("prism", "again")
    }
    baseline = baseline_of(results, study.comparisons[0])
    assert in_common(runs["prism"], baseline) and not in_common(runs["again"], baseline)
