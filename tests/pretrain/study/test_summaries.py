"""Pairs of a study's runs."""

from __future__ import annotations

from pathlib import Path

from pretrain.study.planning import parse_study
from pretrain.study.results import RunResult
from pretrain.study.summaries import View

TEXT = """
recipe: micro
seeds: 3
settings: {steps: 20}
baseline: uniform
variants: {uniform: {heads: 8x4}, prism: {}}
"""


def differences(states=None, without=(), measure="val_loss", last=1):
    """Of runs with two validations, the first at 9 and the last at the seed, prism's at 0.25 more."""
    study = parse_study(TEXT, "planted", Path("runs/planted"))
    results = []
    for run in study.runs:
        losses = {10: 9.0, 20: run.seed + 0.25 * (run.variant == "prism")}
        rows = [{"step": step, "tokens": 10 * step, "val_loss": loss} for step, loss in losses.items()]
        if run.name not in without:
            results.append(RunResult(run, (states or {}).get(run.name, "finished"), rows))
    return View(study, results, measure, last).summaries[1].differences


def test_only_finished_runs_of_one_seed_are_paired():
    assert differences() == {1: 0.25, 2: 0.25, 3: 0.25}
    assert differences(last=2) == {1: 0.125, 2: 0.125, 3: 0.125}
    assert differences(last=3) == differences(measure="val_bpb") == {}
    assert differences({"uniform-s1": "unfinished", "prism-s3": "failed"}) == {2: 0.25}
    assert differences(without=("uniform-s1", "prism-s2", "prism-s3")) == {}
