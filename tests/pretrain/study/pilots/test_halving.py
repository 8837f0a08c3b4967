"""Who goes on from a rung, the rungs' studies, and the study that is left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from pretrain.study.command import dispatch
from pretrain.study.pilots.halving import KEPT_FILE, drop
from pretrain.study.running.scheduler import Scheduler
from pretrain.study.study_file import build_rung, parse_study
from pretrain.study.summaries import build_view
from tests.helpers.planted_runs import plant, result
from tests.helpers.refusals import refused
from tests.pretrain.study.report.conftest import planted, rows_of, table_of

LOSSES = {"plain": 4.2, "a": 4.0, "b": 4.1, "c": 4.3, "d": 4.05}
STUDY = """
title: Many
seeds: [1, 2]
pilot_seeds: [11, 12, 13]
halving: {rungs: [0.25, 0.5], keep: 0.5}
settings: {steps: 80, global_batch_tokens: 512}
baseline: plain
variants: {plain: {}, a: {heads: 2x4}, b: {heads: 4x4}, c: {heads: 16x4}, d: {heads: "2,2,4,4"}}
contrasts: {"a − c": {plus: a, minus: c}}
"""


def study(folder=Path("runs/it"), **changes):
    values = {key: value for key, value in (yaml.safe_load(STUDY) | changes).items() if value is not None}
    return parse_study(yaml.safe_dump(values, sort_keys=False), "it", folder)


def noisy(losses, seeds=(11, 12, 13), sd=0.001, seed=0):
    generator = np.random.default_rng(seed)
    return {name: {s: loss + generator.normal(scale=sd) for s in seeds} for name, loss in losses.items()}


def test_the_best_half_and_the_baseline_go_on():
    results = noisy(LOSSES)
    found = drop(1, results, "plain", 0.5)
    assert [each.variant for each in found] == ["a", "d", "b", "plain", "c"]
    assert [each.variant for each in found if each.kept] == ["a", "d", "b", "plain"]
    (dropped,) = (each for each in found if not each.kept)
    gaps = np.array([results["c"][seed] - results["b"][seed] for seed in (11, 12, 13)])
    assert dropped.behind == pytest.approx(gaps.mean())
    assert dropped.low == pytest.approx(gaps.mean() - stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / 3**0.5)
    assert not dropped.may_be_missed


def test_what_may_be_missed_is_said():
    close = drop(1, noisy({"plain": 4.0, "a": 3.9, "b": 3.905}, sd=0.02), "plain", 0.2)
    assert [each.variant for each in close if each.may_be_missed] == [close[1].variant]
    one_seed = drop(1, noisy(LOSSES, seeds=(11,)), "plain", 0.2)
    assert {each.variant for each in one_seed if each.may_be_missed} == {"b", "c", "d"}


def test_variants_that_failed_are_dropped_and_higher_may_be_better():
    results = noisy(LOSSES)
    results["a"] = {11: 3.0}
    results["b"] = dict.fromkeys((11, 12, 13), float("nan"))
    found = {each.variant: each for each in drop(1, results, "c", 0.9)}
    assert (found["a"].kept, found["a"].mean, found["b"].kept) == (False, None, False)
    assert found["c"].kept  # the baseline
    assert found["d"].kept
    best = drop(1, noisy(LOSSES), "plain", 0.2, higher_is_better=True)
    assert [each.variant for each in best if each.kept] == ["c", "plain"]


def test_the_share_that_goes_on_is_counted_as_it_is_written():
    for count in (10, 30, 100):
        results = {f"v{index:03}": {11: 4.0 + index} for index in range(count)}
        for percent in range(1, 100):
            found = drop(1, results, "v000", percent / 100)
            assert sum(each.kept for each in found) == -(-percent * count // 100)


def finish_rung(folder, losses=LOSSES):
    short = build_rung(study(folder))
    for planned in short.runs:
        loss = noisy(losses)[planned.variant][planned.seed]
        plant(result(planned, [{"step": planned.run.steps, "tokens": 10240, "val_loss": loss}]))
    return short


def test_rungs_drop_variants_until_the_rest_is_trained(tmp_path, capsys, monkeypatch):
    path, folder = tmp_path / "it.yaml", tmp_path / "out"
    path.write_text(STUDY, encoding="utf-8")
    started = []
    monkeypatch.setattr(Scheduler, "run", lambda self: started.append(self.study) or {})
    first = finish_rung(folder)
    assert {(run.run.steps, run.run.seed, run.run.runs_dir) for run in first.runs} == {
        (20, seed, str(folder / "rung-1")) for seed in (11, 12, 13)
    }
    assert len(first.runs) == 15
    with refused("rung 1 is not finished yet"):
        dispatch(["task", str(path), "0", "--out", str(folder)])
    assert dispatch(["run", str(path), "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "rung     1 of 2: 0.25 of the steps" in printed
    assert "dropped  c" in printed
    assert "then     python -m pretrain.study run it again" in printed
    (second,) = started  # its runs were not trained by the stand-in
    assert {run.variant for run in second.runs} == {"plain", "a", "b", "d"}
    assert {run.run.steps for run in second.runs} == {40}
    finish_rung(folder)
    assert dispatch(["list", str(path), "--out", str(folder)]) == 0
    assert "rung 2: 0 of 12 runs are left" in capsys.readouterr().out
    assert dispatch(["run", str(path), "--out", str(folder)]) == 0
    trained = started[-1]
    assert trained.next_rung is None
    assert [run.name for run in trained.runs] == ["plain-s1", "a-s1", "d-s1", "plain-s2", "a-s2", "d-s2"]
    assert {run.run.steps for run in trained.runs} == {80}
    kept = json.loads((folder / KEPT_FILE).read_text())
    assert [(each["rung"], each["variant"]) for each in kept if not each["kept"]] == [(1, "c"), (2, "b")]
    left = study(folder)
    view = build_view(left, planted(left, lambda run: LOSSES[run.variant]))
    assert set(rows_of(view)) == {"plain (baseline)", "a", "d"}
    assert view.contrasted[0].values == {}  # one side was dropped
    rows = [row for row in table_of(view, "halving") if row["goes on"] == "no"]
    assert [(row["rung"], row["variant"]) for row in rows] == [("1", "c"), ("2", "b")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pilot_seeds": None}, "pilot_seeds: missing"),
        ({"halving": {"rungs": [0.5, 0.25]}}, "halving.rungs: [0.5, 0.25] is not valid"),
        ({"halving": {"rungs": [1.0]}}, "halving.rungs.0: 1.0 is not valid"),
        ({"halving": {"rungs": [0.5], "keep": 1.5}}, "halving.keep: 1.5 is not valid"),
        ({"rates": [1e-3, 2e-3]}, "halving: {"),
        ({"variants": {"plain": {}, "a": {}, "b": {"against": "a"}}, "contrasts": None}, "b.against: 'a'"),
    ],
)
def test_bad_values_are_one_line(changes, said):
    with refused(said, begins="study: "):
        study(**changes)


def test_designs_are_not_halved():
    design = {"kind": "full", "factors": {"layer_0": [2, 4], "layer_1": [2, 4]}}
    with refused("a design needs all its runs"):
        study(variants=None, baseline=None, contrasts=None, design=design)
