"""The value that pilots choose, the pilots' study, and the values in place."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pretrain.study.command import dispatch
from pretrain.study.notebook import Study
from pretrain.study.planning import build_pilot, parse_study, read_study, reread
from pretrain.study.results import failed_mark, list_unfinished, load_results, load_study
from pretrain.study.running import run
from pretrain.study.running.scheduler import Scheduler, write_study
from pretrain.study.settings import label
from pretrain.study.summaries import build_view
from pretrain.study.tuning import TUNED_FILE, choose_all, read_tuned, write_tuned
from tests.helpers.planted_runs import plant, result
from tests.helpers.refusals import refused
from tests.pretrain.study.report.conftest import table_of

STUDY = """
title: Each at its best
seeds: [1, 2]
pilot_seeds: [11, 12]
tune: {optimizer.learning_rate: [1.0e-3, 2.0e-3, 4.0e-3]}
settings: {steps: 80, global_batch_tokens: 512, optimizer: {weight_decay: 0.3}}
baseline: plain
variants:
  plain: {}
  muon: {optimizer: {kind: muon}, seed_shift: 100, tune: &muon {muon.learning_rate: [1.0e-3, 2.0e-3, 4.0e-3]}}
  slow: {against: muon, optimizer: {kind: muon}, tune: *muon}
contrasts: [muon - plain]
"""


def study(folder=Path("runs/it"), **changes):
    values = yaml.safe_load(STUDY) | changes
    values = {key: value for key, value in values.items() if value is not None}
    return parse_study(yaml.safe_dump({"recipe": "micro"} | values, sort_keys=False), "it", folder)


@pytest.mark.parametrize(
    ("values", "results", "value", "at_edge"),
    [
        ([1.0, 2.0, 4.0], [3.0, 4.0, 5.0], 1.0, True),
        ([1.0, 2.0, 4.0], [5.0, 4.0, math.nan], 2.0, False),
        ([1.0, 2.0, 4.0], [math.nan, math.inf, 5.0], 4.0, True),
        (["a", "b"], [5.0, 4.0], "b", False),
        ([1.0, 2.0, 4.0], [4.0, 4.0, 4.0], 1.0, True),
        ([4, 16, 8], [5.0, 4.5, 4.0], 8, False),
    ],
)
def test_the_value_with_the_best_result_is_chosen(values, results, value, at_edge):
    runs = {f"a@{label(each)}": {7: result} for each, result in zip(values, results, strict=True)}
    found = choose_all({"a": ("x", values)}, [7], runs)["a"]
    assert (found.value, found.at_edge) == (value, at_edge)


def test_of_accuracies_the_highest_is_chosen():
    runs = {"a@1": {7: 0.6}, "a@2": {7: 0.8}, "a@4": {7: 0.7}}
    assert choose_all({"a": ("x", [1, 2, 4])}, [7], runs, higher_is_better=True)["a"].value == 2


def test_the_pilots_are_a_study_of_every_value():
    found = build_pilot(study())
    names = [planned.name for planned in found.runs]
    assert names[2:4] == ["plain@0.004-s11", "muon@0.001-s11"] and len(names) == 18
    assert {planned.run.seed for planned in found.runs} == {11, 12}  # no seed_shift
    for planned in found.runs:
        run = planned.run
        value = float(planned.variant.split("@")[1])
        own = run.muon.learning_rate if run.optimizer.kind == "muon" else run.optimizer.learning_rate
        assert (own, run.optimizer.weight_decay, run.runs_dir) == (value, 0.3, "runs/it/pilot")


def test_a_variant_may_have_values_of_its_own_or_alone():
    own = {"tune": {"optimizer": {"learning_rate": [5e-4, 7e-4]}}}
    variants = {"plain": {"tune": {"optimizer.learning_rate": [5e-4, 7e-4]}}, "other": {"heads": "4x4"}}
    found = build_pilot(study(variants=variants, contrasts=None))
    names = list(dict.fromkeys(planned.variant for planned in found.runs))
    assert names == ["plain@0.0005", "plain@0.0007", "other@0.001", "other@0.002", "other@0.004"]
    alone = study(variants=variants, contrasts=None, tune=None)
    assert list(alone.tried) == ["plain"] and len(build_pilot(alone).runs) == 4
    with refused("variants.plain.tune.optimizer: "):
        study(variants={"plain": own}, contrasts=None)


def chosen(found, best):
    """Results of pilots whose best value is *best* by variant."""
    return {
        f"{name}@{value:g}": dict.fromkeys((11, 12), 4 + math.log(value / best[name]) ** 2)
        for name, (_, values) in found.tried.items()
        for value in values
    }


def test_what_is_chosen_is_in_place(tmp_path):
    before = study(tmp_path)
    assert before.untuned == ["plain", "muon", "slow"]
    best = {"plain": 2e-3, "muon": 2e-3, "slow": 4e-3}
    tuned = choose_all(before.tried, [11, 12], chosen(before, best))
    assert [tuned[name].at_edge for name in best] == [False, False, True]
    write_tuned(tmp_path, tuned)
    assert read_tuned(tmp_path) == tuned
    after = study(tmp_path)
    assert after.untuned == []
    more = {"plain": {"tune": {"optimizer.learning_rate": [2e-3, 4e-3, 8e-3]}}}
    wider = study(tmp_path, variants=more | {"muon": after.file.variants["muon"]}, contrasts=None)
    assert wider.untuned == ["plain"]  # 0.008 was not tried
    for changed in (
        {"tune": {"optimizer.learning_rate": [1e-3, 4e-3]}},  # 0.002 was taken out
        {"tune": {"optimizer.weight_decay": [1e-3, 2e-3, 4e-3]}},
        {"pilot_seeds": [13, 14]},
    ):
        stale = study(tmp_path, **changed)
        assert "plain" in stale.untuned and "plain" not in stale.tuned
        plant(result(after.runs[0], [{"step": 80, "tokens": 1, "val_loss": 4.0}]))  # at the value chosen then
        with refused("study: plain: not tuned for the values that the file has now; head-schedules study"):
            load_results(stale)
        shutil.rmtree(after.runs[0].folder)
        assert stale.variants["plain"].run.optimizer.learning_rate == 4e-3  # the recipe's
    runs = {planned.variant: planned.run for planned in after.runs}
    assert runs["plain"].optimizer.learning_rate == 2e-3
    assert runs["muon"].muon.learning_rate == 2e-3
    assert runs["slow"].muon.learning_rate == 4e-3
    assert runs["muon"].optimizer.weight_decay == 0.3


def test_a_value_counts_if_all_its_pilots_are_finished():
    found = study()
    results = chosen(found, dict.fromkeys(found.tried, 2e-3))
    del results["plain@0.002"][12]
    tuned = choose_all(found.tried, [11, 12], results)
    assert tuned["plain"].tried[1] == (2e-3, None)
    assert tuned["muon"].value == pytest.approx(2e-3)
    for value in (0.001, 0.002, 0.004):
        results.pop(f"plain@{value}", None)
    with refused("study: plain: no value of optimizer.learning_rate has a finite result"):
        choose_all(found.tried, [11, 12], results)


def test_run_chooses_from_finished_pilots_and_reports_them(tmp_path, capsys, monkeypatch):
    path = tmp_path / "it.yaml"
    path.write_text(f"recipe: micro\n{STUDY}", encoding="utf-8")
    folder = tmp_path / "out"
    before = study(folder)
    pilot = build_pilot(before)
    results = chosen(before, {"plain": 2e-3, "muon": 2e-3, "slow": 4e-3})
    for planned in pilot.runs:
        loss = results[planned.variant][planned.seed]
        plant(result(planned, [{"step": 80, "tokens": 80 * 512, "val_loss": loss}]))
    assert dispatch(["list", str(path), "--out", str(folder)]) == 0
    assert "not tuned yet: 0 of 18 pilots are left" in capsys.readouterr().out
    with refused("plain is not tuned yet"):
        dispatch(["task", str(path), "0", "--out", str(folder)])
    assert dispatch(["run", str(path), "--out", str(folder), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "tuned    plain: optimizer.learning_rate 0.002\n" in printed
    assert "slow: muon.learning_rate 0.004; none beyond it was tried: add one to tune, or run" in printed
    assert not (folder / TUNED_FILE).exists()
    started = []
    monkeypatch.setattr(Scheduler, "run", lambda self: started.append(self.study) or {})
    # The first command stops at an edge; the same again accepts it.
    assert [dispatch(["run", str(path), "--out", str(folder)]) for _ in range(2)] == [1, 0]
    assert [each.untuned for each in started] == [[]]
    (folder / TUNED_FILE).unlink()
    loaded = Study.load(path, folder)
    assert [loaded.run() for _ in range(2)] == [1, 0]  # in one session, too
    assert loaded.results().state.eq("missing").all()
    write_study(pilot)
    opened = load_study(folder / "pilot")
    assert len(opened.runs) == len(reread(opened).runs) == 18
    assert pilot.command("list") == before.command("list")
    (folder / "pilot" / pilot.runs[0].name / "config.yaml").write_text(
        replace(pilot.runs[0].run, steps=90).to_yaml(), encoding="utf-8"
    )
    with refused("was made with steps 90 (now 80)"):
        dispatch(["run", str(path), "--out", str(folder)])
    (folder / "pilot" / pilot.runs[0].name / "config.yaml").unlink()
    own = study(folder).runs[0]
    earlier = replace(own.run, optimizer=replace(own.run.optimizer, learning_rate=1e-3))
    (folder / own.name).mkdir()
    (folder / own.name / "config.yaml").write_text(earlier.to_yaml(), encoding="utf-8")
    with refused("optimizer.learning_rate 0.001 (now 0.002); pilots have chosen again since: move away what"):
        dispatch(["run", str(path), "--out", str(folder)])
    (folder / own.name / "config.yaml").unlink()
    assert str(path) not in read_study(path, folder).command("run")  # but the folder, which has the same
    path.write_text(path.read_text().replace("4.0e-3]}\nsettings", "5.0e-3]}\nsettings"), encoding="utf-8")
    assert read_study(path, folder).command("run") == f"head-schedules study run {path} --out {folder}"
    assert json.loads((folder / TUNED_FILE).read_text())["slow"]["at_edge"] is True
    rows = table_of(build_view(study(folder), []), "tuned")
    assert rows[2]["chosen"] == "0.004 (an edge)" and {row["values tried"] for row in rows} == {"3"}
    assert rows[0]["mean of the pilots"].startswith("0.001: 4.4805, 0.002: 4.0000")


@pytest.mark.parametrize(
    ("reason", "left"),
    [
        ("exit code 3: error: step 9: 10 updates in a row were skipped", 0),
        ("job 5 failed with exit status 3", 0),
        ("exit code 2: error: name: runs/it is in use by another job", 1),
        ("exit code -9: ", 1),
        ("exit code 1: ZeroDivisionError", 1),
        ("job 5 failed with exit status 137", 1),
    ],
)
def test_pilots_that_failed_are_tried_again(tmp_path, capsys, monkeypatch, reason, left):
    """Before a value is chosen; those that diverged would do so again."""
    path = tmp_path / "it.yaml"
    path.write_text(f"recipe: micro\n{STUDY}", encoding="utf-8")
    before = study(tmp_path / "out")
    pilot = build_pilot(before)
    results = chosen(before, dict.fromkeys(before.tried, 2e-3))
    failed = pilot.runs[-1]
    for planned in pilot.runs:
        if planned is not failed:
            loss = results[planned.variant][planned.seed]
            plant(result(planned, [{"step": 80, "tokens": 80 * 512, "val_loss": loss}]))
    failed_mark(failed).parent.mkdir(exist_ok=True, parents=True)
    failed_mark(failed).write_text(reason + "\n")
    monkeypatch.setattr(Scheduler, "run", lambda self: {})
    dispatch(["run", str(path), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert len(list_unfinished(pilot)) == left and ("tuned    " in printed) == (not left)
    assert (f"note     {failed.name} failed, and its value does not count: {reason}" in printed) == (not left)


@pytest.mark.parametrize("code", [75, 130])
def test_a_request_to_stop_while_the_last_pilots_end_is_heard(tmp_path, capsys, monkeypatch, code):
    """They all finish, and so are left to no other session."""
    found, left = study(tmp_path / "out"), iter([[1], []])
    monkeypatch.setattr(run, "list_unfinished", lambda _: next(left))
    begin = run.run_study
    monkeypatch.setattr(run, "run_study", lambda *_: code)
    assert begin(found) == code
    assert "then     head-schedules study run" in capsys.readouterr().out


def test_pilots_of_several_factors_are_found(tmp_path, monkeypatch):
    """A variant's name has dots where those of its folders have dashes."""
    found = study(tmp_path, vary={"steps": [80, 100]}, variants={"plain": {}}, contrasts=None)
    pilot = build_pilot(found)
    losses = [{"val_loss": 4.0 - 0.01 * at, "tokens": 1} for at in range(len(pilot.runs))]
    rows = [[{"step": each.run.steps} | loss] for each, loss in zip(pilot.runs, losses, strict=True)]
    monkeypatch.setattr(run, "load_results", lambda _: list(map(result, pilot.runs, rows)))
    run._choose(found, pilot, dry_run=False)
    chosen = {name: each.value for name, each in read_tuned(tmp_path).items()}
    assert chosen == {"80.plain": 4e-3, "100.plain": 4e-3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pilot_seeds": None}, "pilot_seeds: missing"),
        ({"pilot_seeds": [2, 3]}, "pilot_seeds: [2, 3] is not valid; runs of the study have seed 2;"),
        ({"pilot_seeds": [3, 102]}, "runs of the study have seed 102; give others"),  # with muon's shift
        ({"tune": {"steps": [1]}}, "tune.steps: [1] is not valid; give from 2 to 32 levels"),
        ({"tune": {"steps": [1, 2], "a": [1, 2]}}, "tune"),
        ({"tune": {"stesp": [1, 2]}}, "study: tune: stesp: unknown key; did you mean 'steps'"),
        ({"tune": {"steps": [1, 1]}}, "tune.steps: [1, 1] is not valid; give from 2 to 32 levels, each once"),
        ({"tune": {"heads": ["2,4", "a/b"]}}, "tune.heads: ['2,4', 'a/b'] is not valid"),
        ({"variants": {"plain": {}}, "contrasts": None, "tune": None}, "pilot_seeds: [11, 12] is not valid"),
    ],
)
def test_bad_values_are_one_line(changes, said):
    with refused(said, begins="study: "):
        study(**changes)


def test_a_damaged_choice_is_one_line(tmp_path):
    for text in ("{", "[]", '{"plain": {"field": "a"}}'):
        (tmp_path / TUNED_FILE).write_text(text, encoding="utf-8")
        with refused(str(tmp_path / TUNED_FILE), begins="study: "):
            study(tmp_path)


def test_what_is_tuned_is_set_nowhere_else():
    own = {"plain": {"optimizer": {"learning_rate": 5e-3}}}
    with refused("variant plain: optimizer.learning_rate: set by variant: plain", "leave one out"):
        study(variants=own, contrasts=None)
    level = {"rate": {"high": {"optimizer.learning_rate": 5e-3}, "as_is": {}}}
    with refused("optimizer.learning_rate: set by rate: high"):
        study(vary=level, variants={"plain": {}}, contrasts=None)


def test_commands_repeat_what_was_given(tmp_path, capsys, monkeypatch):
    """The folder holds what flags have set; a dry run has none."""
    monkeypatch.chdir(tmp_path)
    Path("it.yaml").write_text(f"recipe: micro\n{STUDY}", encoding="utf-8")
    given = ["run", "it.yaml", "--settings.steps", "40", "--out", "o", "--slurm", "--sbatch=--partition=big"]
    assert dispatch([*given, "--dry_run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("then     the study's own runs, when")
    monkeypatch.setattr(run, "submit", lambda line: "7")
    assert dispatch([*given, "--parallel", "3"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    again = "head-schedules study run o --parallel 3 --slurm --sbatch=--partition=big again"
    assert said == f"then     {again}, when these runs are finished"
    assert {planned.run.steps for planned in load_study(Path("o")).runs} == {40}
