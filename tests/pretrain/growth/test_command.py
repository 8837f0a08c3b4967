"""head-schedules growth report, on a run of two steps on one rank."""

import json
from types import SimpleNamespace

import pytest

from model.errors import UserError
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.growth.report import contents
from pretrain.growth.report.command import main
from pretrain.metrics.file import read_metrics
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session


@pytest.fixture(scope="module")
def run(small_folder, tmp_path_factory):
    """A run with a schedule that does not grow."""
    flags = ("--steps", "2", "--validation.sequences", "6", "--heads", "2,0,4,4")
    made = nano_run(small_folder, tmp_path_factory.mktemp("runs"), *flags)
    assert run_distributed(session, 1, made, timeout=120)[0][1] is None
    return made.folder


def test_a_run_that_does_not_grow(run, tmp_path, capsys):
    out = tmp_path / "report"
    assert main(["report", str(run), "--sequences", "6", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    validated = [row["val_loss"] for row in read_metrics(run) if "val_loss" in row][-1]
    assert report["loss"] == pytest.approx(validated, rel=1e-6), "the same windows as validation"
    assert [len(worths) for worths in report["worths"]] == report["heads"]
    assert (report["step"], report["windows"], report["growth"], report["predictions"]) == (2, 6, None, [])
    assert report["removal"][-1]["removed"] == sum(report["heads"])
    assert (out / "worths.png").stat().st_size > 10_000 and not (out / "growth.png").exists()
    said = (
        "step 2",
        "correlation with depth +0.",
        "worth of each head",
        "the largest share tried",
        "on 6 windows",
        "wrote",
    )
    assert all(expected in printed for expected in said)
    assert "law" not in printed


def test_a_grown_run(small_folder, tmp_path, capsys):
    schedule = json.dumps({1: "2x4", 2: "3x4", 3: "4,3,3,3"})
    flags = ("--steps", "4", "--growth.criterion", "schedule", "--validation.every", "0")
    run = nano_run(small_folder, tmp_path, *flags, "--growth.schedule", schedule)
    assert run_distributed(session, 1, run, timeout=120)[0][1] is None
    assert main(["report", str(run.folder), "--sequences", "2"]) == 0
    printed = capsys.readouterr().out
    report = json.loads((run.folder / "growth/report.json").read_text())
    assert report["heads"] == [4, 3, 3, 3] and report["growth"]["start"] == 1
    assert [len(worths) for worths in report["worths"]] == [4, 3, 3, 3]
    assert [found["events"] for found in report["predictions"]] == [3, 2, 2, 2]
    assert report["predictions"][1]["predicted"] is None
    assert (run.folder / "growth/growth.png").stat().st_size > 10_000
    assert "fewer than 3 growth events" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{run}", "--sequences", "0"], "sequences: 0 is not valid; give a positive number"),
        (["report", "{run}", "--step", "7"], "step: no checkpoint of step 7"),
        (["report", "nowhere"], "run: 'nowhere' is not a run's folder"),
        (["report", "{run}", "--out", "/dev/null/x"], "out: cannot write '/dev/null/x"),
    ],
)
def test_bad_input_is_one_clear_line(run, capsys, arguments, message):
    assert main([argument.format(run=run) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_without_heads(small_folder, tmp_path, capsys):
    flags = ("--steps", "1", "--heads", "0x4", "--validation.every", "0")
    run = nano_run(small_folder, tmp_path, *flags)
    assert run_distributed(session, 1, run, timeout=120)[0][1] is None
    capsys.readouterr()
    assert main(["report", str(run.folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "has a model without attention heads" in printed.err


def test_without_the_corpus(run, monkeypatch, capsys):
    from pretrain.run.saved import SavedRun

    monkeypatch.setattr(SavedRun, "corpora", lambda self: [])
    assert main(["report", str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data: no corpus that") and error.count("\n") == 1


def test_weights_of_corpora():
    state = TrainingState(data=DataIdentity(data=[("hash", "much")]))
    source = SimpleNamespace(state=state, corpora=list, run_folder="runs/a")
    with pytest.raises(UserError, match=r"has the shares .*'much'.* of data; give numbers above zero"):
        contents.held_out(source, 3)
