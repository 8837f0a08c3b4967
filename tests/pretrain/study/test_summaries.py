"""Pairs of a study's runs, and how often their intervals cover the truth in many planted studies."""

from __future__ import annotations

from pathlib import Path

from pretrain.study.planning import parse_study
from pretrain.study.results import RunResult
from pretrain.study.summaries import View


def planted(seeds):
    """A study of two variants and one with other seeds, in which nothing has been run."""
    text = """
recipe: micro
settings: {steps: 20}
baseline: uniform
variants: {uniform: {heads: 8x4}, prism: {}, again: {heads: 8x4, seed_shift: 1000}}
"""
    return parse_study(f"seeds: {seeds}\n{text}", "planted", Path("runs/planted"))


def results_of(study, loss, states=None):
    """Every run finished with two validations, the last with the loss that *loss* gives it."""
    return [
        RunResult(
            planned,
            (states or {}).get(planned.name, "finished"),
            [
                {"step": 10, "tokens": 100, "val_loss": 9.0},
                {"step": 20, "tokens": 200, "val_loss": loss(planned)},
            ],
        )
        for planned in study.runs
    ]


def summaries(study, results, measure="val_loss", last=1):
    """By the variant's name."""
    return {found.variant: found for found in View(study, results, measure, last).summaries}


def test_only_finished_runs_of_one_seed_are_paired():
    study = planted(3)

    def differences(states=None, without=(), **options):
        results = results_of(study, lambda run: run.seed + 0.25 * (run.variant == "prism"), states)
        results = [run for run in results if run.planned.name not in without]
        return summaries(study, results, **options)["prism"].differences

    assert differences() == {1: 0.25, 2: 0.25, 3: 0.25}
    assert differences(last=2) == {1: 0.125, 2: 0.125, 3: 0.125}
    assert differences(last=3) == differences(measure="val_bpb") == {}
    assert differences({"uniform-s1": "unfinished", "prism-s3": "failed"}) == {2: 0.25}
    assert differences(without=("uniform-s1", "prism-s2", "prism-s3")) == {}


def test_a_variant_may_name_what_it_is_compared_with():
    text = """
recipe: micro
settings: {steps: 20}
seeds: 2
baseline: a
variants: {a: {heads: 8x4}, b: {heads: 4x4}, c: {heads: 2x4, against: b}}
"""
    study = parse_study(text, "against", Path("runs/against"))
    found = summaries(study, results_of(study, lambda run: {"a": 1.0, "b": 3.0, "c": 3.5}[run.variant]))
    assert found["c"].differences == {1: 0.5, 2: 0.5} and found["b"].differences == {1: 2.0, 2: 2.0}
    assert found["a"].definition.control is None and not found["a"].differences
    assert {run.planned.variant for run in found["c"].controls.values()} == {"b"}


def test_pairs_of_other_seeds_are_known():
    study = planted(2)
    found = summaries(study, results_of(study, lambda run: 1.0))
    assert [found[name].other_seeds for name in ("uniform", "prism", "again")] == [False, False, True]
