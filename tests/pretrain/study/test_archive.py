"""A recorded study says the same as its folder."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.study.archive import read_archive, write_archive
from pretrain.study.command import main
from pretrain.study.notebook import Study
from pretrain.study.planning import build_pilot, read_study
from pretrain.study.register import read_registered, register
from pretrain.study.report.page import describe_opening
from pretrain.study.report.tables import sections
from pretrain.study.results import list_unfinished, load_results, load_study
from pretrain.study.running.scheduler import Scheduler, write_study
from pretrain.study.summaries import build_view
from pretrain.study.tuning import write_tuned
from tests.helpers.planted_runs import plant, planted_rows, result
from tests.helpers.refusals import refused
from tests.pretrain.study.report.conftest import planted, small_study

GROWING = {"growth": {"criterion": "incrt", "maximum": 8}}
VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "grown": GROWING}
FINALS = {"uniform": (3.5, 3.56, 3.47), "rising": (3.48, math.nan, 3.44), "grown": (3.51, 3.55, 3.49)}
SCORES = {"evaluation/lambada/acc": 0.25, "growth/heads/layer_0": 3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A study's folder with planted runs: one failed, one that has not begun, one whose loss is NaN."""
    monkeypatch.chdir(tmp_path)
    study = small_study(tmp_path / "s", baseline="uniform", variants=VARIANTS, question="Which?")
    write_study(study)
    register(study)
    final = {f"{name}-s{s}": loss for name, losses in FINALS.items() for s, loss in enumerate(losses, 1)}
    del final["uniform-s3"]
    model = study.runs[2].run.build_model_config().replace(heads=(3, 2, 2, 1), head_dim=(16,) * 4)
    more = {"model": lambda run: model if run.run.growth.active else None, "world": {"code": ["abc", "def"]}}
    for found in planted(study, final, more=lambda run: SCORES, **more):
        if found.planned.name == "rising-s3":
            found = result(found.planned, found.rows[:4], failure="error: out of disk")
        if found.state != "missing":
            plant(found)
    return tmp_path / "s"


def test_reports_from_a_record_are_those_of_the_folder(folder, capsys, tmp_path):
    path = tmp_path / "results/s.json"
    assert main(["record", str(folder)]) == 0
    assert capsys.readouterr().out == "wrote results/s.json\n"
    views = [build_view(study, load_results(study)) for study in (load_study(folder), read_archive(path))]
    assert sections(views[0]) == sections(views[1])
    assert describe_opening(views[0]) == describe_opening(views[1])
    for one, other in zip(*(view.results for view in views), strict=True):
        assert (one.planned.name, one.state, one.failure) == (other.planned.name, other.state, other.failure)
        assert one.model_config == other.model_config and one.world == other.world
    for command in ("report", "power"):
        assert main([command, str(path), *(["--sd", "0.1"] if command == "power" else ())]) == 0
    assert (tmp_path / "runs/s/report/index.html").is_file()
    assert "First run" in capsys.readouterr().out
    assert Study.load(path).results().difference.notna().sum() == 3  # without NaN and seed 3


def test_a_record_keeps_validations_and_forgets_steps(folder, tmp_path):
    study = load_study(folder)
    row = {"step": 41, "train_loss": 1.0}
    with (study.runs[0].folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {"step": 81}) + "\n" + json.dumps(row | {"step": 82}) + "\n")
    assert main(["record", str(folder), "--to", str(tmp_path / "x.json")]) == 0
    rows = load_results(read_archive(tmp_path / "x.json"))[0].rows
    assert [each["step"] for each in rows] == [10, 20, 30, 40, 50, 60, 70, 80, 82]
    assert "tokens_per_second" not in rows[0] and rows[-2]["evaluation/lambada/acc"] == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("runs"), "runs"),
        (lambda values: values.update(extra=1), "extra"),
        (lambda values: values["study"].update(seeds="many"), "seeds"),
        (lambda values: values["runs"]["grown-s1"].update(state="done"), "grown-s1.state"),
        (lambda values: values["runs"]["grown-s1"].update(origin=7), "runs.grown-s1.origin: 7 is not valid"),
        (lambda values: values["runs"]["grown-s1"]["rows"].pop("step"), "runs.grown-s1.rows: give columns"),
        (lambda values: values["runs"]["grown-s1"]["rows"]["step"].append(9), "runs.grown-s1.rows: give col"),
    ],
)
def test_files_that_are_no_record(folder, tmp_path, capsys, change, message):
    assert main(["record", str(folder), "--to", str(tmp_path / "x.json")]) == 0
    values = json.loads((tmp_path / "x.json").read_text())
    change(values)
    (tmp_path / "x.json").write_text(json.dumps(values))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: study: ") and message in said and said.count("\n") == 1


def test_what_a_record_lacks_is_trained_elsewhere_and_added_to_it(folder, tmp_path, monkeypatch, capsys):
    """Another machine trains the failed run and the two that had not begun there."""
    assert main(["record", str(folder)]) == 0
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "results/s.json"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    values = json.loads(path.read_text())
    values["machine"] = "a GPU, 1 cores"
    path.write_text(json.dumps(values))
    started = []

    def train(scheduler):
        study = scheduler.study
        for planned in list_unfinished(study):
            started.append(planned.name)
            plant(result(planned, planted_rows(planned, 3.6)))
        return {}

    monkeypatch.setattr(Scheduler, "run", train)
    monkeypatch.setattr(Scheduler, "stopped", None, raising=False)
    assert main(["run", str(path)]) == 0
    assert started == ["uniform-s3", "rising-s3"]
    said = capsys.readouterr().out
    assert "to do    2 runs" in said and f"next     head-schedules study report {path}" in said
    before = read_archive(path)
    assert main(["record", str(path)]) == 0
    after = read_archive(path, out=tmp_path / "nothing")
    assert [run.state for run in load_results(after)] == ["finished"] * 9
    losses = [[row["val_loss"] for run in load_results(each) for row in run.rows] for each in (before, after)]
    assert losses[0] == losses[1]
    assert read_registered(after) == read_registered(load_study(folder))
    first, second = json.loads(path.read_text())["machine"].split("; ")
    assert first == "a GPU, 1 cores" and second.endswith(" cores")
    assert main(["record", str(folder), "--to", str(path)]) == 2
    assert "finished runs that would be lost, uniform-s3, rising-s3;" in capsys.readouterr().err
    archive, text = json.loads(path.read_text()), path.read_text()
    archive["study"]["settings"]["steps"] = 60
    path.write_text(json.dumps(archive))
    assert main(["record", str(folder), "--to", str(path)]) == 2  # the same runs, with other settings
    assert "finished runs that would be lost, uniform-s1" in capsys.readouterr().err
    path.write_text(text)
    assert main(["report", str(path), "--settings.steps", "90"]) == 2
    assert "error: settings.steps: a recorded study has its own" in capsys.readouterr().err


def test_a_record_keeps_pilots(tmp_path, monkeypatch, capsys):
    """Pilots of one machine choose on another, where a folder has none."""
    monkeypatch.chdir(tmp_path)
    rates = {"tune": {"optimizer.learning_rate": [1e-3, 2e-3]}, "pilot_seeds": [9]}
    rates |= {"baseline": "uniform", "variants": {"uniform": {}, "slow": {"steps": 90}}}
    study = small_study(tmp_path / "s", **rates)
    write_study(study)
    pilot = build_pilot(study)
    for planned, loss in zip(pilot.runs, (3.5, 3.4, 3.3), strict=False):
        plant(result(planned, planted_rows(planned, loss)))
    assert main(["record", str(tmp_path / "s")]) == 0
    monkeypatch.setattr(Scheduler, "run", lambda self: {})
    monkeypatch.setattr(Scheduler, "stopped", None, raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["list", "../results/s.json"]) == 0
    assert "1 of 4 pilots are left" in capsys.readouterr().out
    last = build_pilot(read_archive(Path("../results/s.json"))).runs[3]
    plant(result(last, planted_rows(last, 3.4)))
    assert [main(["run", "../results/s.json"]) for _ in range(2)] == [1, 0]  # both at an edge: accepted
    said = capsys.readouterr().out
    assert "tuned    uniform: optimizer.learning_rate 0.002" in said
    assert "tuned    slow: optimizer.learning_rate 0.001" in said and "to do    6 runs" in said
    assert main(["record", "../results/s.json"]) == 0
    recorded = read_archive(Path("../results/s.json"), tmp_path / "none")
    assert recorded.untuned == []
    other = {name: replace(each, value=1e-3) for name, each in recorded.tuned.items()}
    (tmp_path / "none").mkdir()
    write_tuned(tmp_path / "none", other)  # of the same study, trained again: no reason to read other runs
    assert read_archive(Path("../results/s.json"), tmp_path / "none").tuned == recorded.tuned
    assert load_study(Path("runs/s")).untuned == []  # jobs read the folder
    # The folder here has one pilot alone; the others' losses, by which it was tuned, would be lost.
    assert read_registered(load_study(Path("runs/s"))) == read_registered(recorded)
    assert main(["record", "runs/s", "--to", "other.json"]) == 2
    assert "runs/s lacks pilots by which it was tuned, uniform@0.001-s9, " in capsys.readouterr().err


def test_a_pilot_that_diverged_is_not_tried_again_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rates: dict[str, Any] = {"tune": {"optimizer.learning_rate": [1e-3, 2e-3]}, "pilot_seeds": [9]}
    study = small_study(tmp_path / "s", **rates, baseline="uniform", variants={"uniform": {}})
    write_study(study)
    one, other = build_pilot(study).runs
    plant(result(one, planted_rows(one, 3.5)))
    plant(
        result(other, planted_rows(other, 3.4)[:2], failure="exit code 3: error: step 9: 10 updates skipped")
    )
    assert main(["record", "s", "--to", "results/s.json"]) == 0
    shutil.rmtree(tmp_path / "s")
    assert main(["list", "results/s.json"]) == 0
    assert "0 of 2 pilots are left" in capsys.readouterr().out


def test_values_are_added_to_a_record_and_taken_out(tmp_path, monkeypatch):
    """A newer choice stands; runs of an older one are made again; pilots of a value that is gone stay."""
    monkeypatch.chdir(tmp_path)
    rates: dict[str, Any] = {"tune": {"optimizer.learning_rate": [1e-3, 2e-3, 3e-3]}, "pilot_seeds": [9]}
    rates |= {"baseline": "uniform", "variants": {"uniform": {}, "slow": {"steps": 90}}}
    study = small_study(tmp_path / "s", **rates)
    write_study(study)
    made = []
    losses = {"0.001": 3.5, "0.002": 3.4, "0.003": 3.2, "0.004": 3.1}

    def train(scheduler):
        for planned in list_unfinished(scheduler.study):
            made.append(planned.name)
            plant(result(planned, planted_rows(planned, losses.get(planned.name[-8:-3], 3.3))))
        return {}

    monkeypatch.setattr(Scheduler, "run", train)
    monkeypatch.setattr(Scheduler, "stopped", None, raising=False)
    for planned in build_pilot(study).runs:
        plant(result(planned, planted_rows(planned, losses[planned.name[-8:-3]])))
    assert [main(["run", "s"]) for _ in range(2)] == [1, 0]
    assert main(["record", "s"]) == 0
    path = tmp_path / "results/s.json"
    shutil.rmtree(tmp_path / "s")
    values = json.loads(path.read_text())
    values["study"]["tune"]["optimizer.learning_rate"] = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3]
    path.write_text(json.dumps(values))
    losses["0.005"] = 3.6
    made.clear()
    assert main(["run", str(path)]) == 0
    assert len(made) == 4 + 6, "pilots of two values, and all runs again: those there were made with 0.003"
    again = tmp_path / "again.json"
    assert main(["record", str(path), "--to", str(again)]) == 0
    assert {each.value for each in read_archive(again).tuned.values()} == {4e-3}
    values = json.loads(again.read_text())
    values["study"]["tune"]["optimizer.learning_rate"] = [2e-3, 3e-3, 4e-3, 5e-3]
    again.write_text(json.dumps(values))
    assert main(["run", str(again)]) == 0
    assert main(["record", str(again)]) == 0
    assert {"uniform@0.001-s9", "slow@0.001-s9"} <= {*json.loads(again.read_text())["runs"]}


def test_a_record_keeps_what_a_mean_of_training_losses_is_made_of(tmp_path):
    given = {"baseline": "uniform", "variants": {"uniform": {}, "slow": {"steps": 90}}}
    study = small_study(tmp_path / "s", **given, measure="train_loss", last_validations=3)
    write_study(study)
    rows = [{"step": step, "tokens": step, "train_loss": 9.0 - 0.1 * step} for step in range(1, 81)]
    plant(result(study.runs[0], rows))
    write_archive(study, tmp_path / "x.json")
    kept = load_results(read_archive(tmp_path / "x.json"))[0]
    assert len(kept.rows) == 3 and kept.result("train_loss", 3) == pytest.approx(9.0 - 0.1 * 79)


def test_nothing_to_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_study(small_study(tmp_path / "s", baseline="uniform", variants=VARIANTS))
    assert main(["record", str(tmp_path / "s")]) == 2
    assert "no run of" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_the_recipe_of_the_runs_is_kept(tmp_path, monkeypatch, capsys):
    """Whatever becomes of its file, and wherever the record is read."""
    monkeypatch.chdir(tmp_path)
    recipe, path = tmp_path / "mine.yaml", tmp_path / "kept.yaml"
    recipe.write_text("model: prism-micro\nvocab_size: 2048\nsteps: 80\noptimizer.learning_rate: 4.0e-3\n")
    path.write_text("recipe: mine.yaml\nseeds: 1\nbaseline: a\nvariants: {a: {heads: 8x4}, b: {}}\n")
    study = read_study(path, tmp_path / "s")
    write_study(study)
    for found in planted(study, {"a-s1": 3.5, "b-s1": 3.4}):
        plant(found)
    assert main(["record", "s"]) == 0
    recipe.write_text("model: prism-micro\nvocab_size: 2048\nsteps: 80\noptimizer.learning_rate: 9.0e-3\n")
    with refused("was made with optimizer.learning_rate 0.004 (now 0.009)", "give the folder"):
        load_results(read_study(path, tmp_path / "s"))
    recipe.unlink()
    monkeypatch.chdir("/")
    for kept in (load_study(tmp_path / "s"), read_archive(tmp_path / "results/s.json")):
        assert [each.run.optimizer.learning_rate for each in kept.runs] == [4e-3, 4e-3]
        assert [found.state for found in load_results(kept)] == ["finished", "finished"]
    values = {
        "recipes": {"mine.yaml": {"steeps": 3}},
        "recipe": "mine.yaml",
        "baseline": "a",
        "variants": {"a": {}},
    }
    with refused("steeps: unknown key in recipes.mine.yaml"):
        small_study(tmp_path / "x", **values)
