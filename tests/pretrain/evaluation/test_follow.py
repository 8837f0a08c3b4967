"""Checkpoints of a run that trains elsewhere are each scored once, whatever is killed meanwhile."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from model.errors import MachineError, UserError
from pretrain.evaluation import command, follow
from pretrain.evaluation.follow import Follower
from pretrain.metrics.file import EVALUATION_NAME, Columns, read_metrics
from pretrain.plots.command import main as plot
from pretrain.run import saved
from pretrain.run.folder import RunLock
from tests.helpers.damage import damage
from tests.helpers.exports import trained
from tests.helpers.items import write_data_sets
from tests.helpers.refusals import refusal
from tests.helpers.training import alone

SETTINGS = {"tasks": ["piqa"], "limit": None}


@pytest.fixture(scope="module")
def finished(small_folder, tmp_path_factory):
    """A run with checkpoints of steps 4, 8 and 12, its last."""
    more = "--checkpoint.keep_last 9 --architecture.context_length 128 --micro_batch 1"
    return trained(small_folder, tmp_path_factory.mktemp("runs"), "run", more, ranks=1, stage=1).folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    return shutil.copytree(finished, tmp_path / "run")


def scored_steps(folder, settings=SETTINGS, during=lambda step: None):
    """Follow with a score that is a function of the step; the steps in the order in which they are scored."""
    steps = []

    def score(step):
        during(step)
        steps.append(step)
        return {"piqa/acc": step / 100}

    follow.follow(folder, settings, score, alone())
    return steps


def test_each_checkpoint_is_scored_once_as_it_comes(run, tmp_path):
    """The run begins after its follower, and writes its last checkpoint while an earlier one is scored."""
    last, here = run / "checkpoints/step_000012", tmp_path / "last"
    last.rename(here)
    run.rename(tmp_path / "later")
    polls = iter(range(3))

    def begin(seconds):
        if next(polls) == 1:
            (tmp_path / "later").rename(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow.time, "sleep", begin)
        assert scored_steps(run, during=lambda step: here.rename(last) if step == 8 else None) == [4, 8, 12]
    assert scored_steps(run) == []
    assert scored_steps(run, SETTINGS | {"limit": 2}) == [4, 8, 12], "other scores"


def test_a_kill_loses_at_most_the_checkpoint_in_hand(run):
    def kill(step):
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored_steps(run, during=kill)
    with (run / EVALUATION_NAME).open("a") as file:
        file.write('{"step": 8, "evalu')  # killed while it wrote
    assert scored_steps(run) == [8, 12]
    rows = [json.loads(line) for line in (run / EVALUATION_NAME).read_text().splitlines()]
    assert [(row["step"], row["evaluation/piqa/acc"]) for row in rows] == [(4, 0.04), (8, 0.08), (12, 0.12)]


def test_damaged_and_pruned_checkpoints_are_passed_over(run, capsys):
    damage(next((run / "checkpoints/step_000004").rglob("*.safetensors")), "flipped")

    def score(step):
        from pretrain.run.saved import SavedRun

        if step == 8:
            shutil.rmtree(run / "checkpoints/step_000008")
        return {"piqa/acc": SavedRun.open(run, step).state.step / 100}

    follow.follow(run, SETTINGS, score, alone())
    printed = capsys.readouterr().out
    assert "checkpoint of step 4 is passed over" in printed and "checkpoint of step 8 is passed" in printed
    assert "step 12: piqa/acc 0.1200" in printed
    assert f"{run} has all its steps; checkpoints scored: 1, passed over: 2" in printed


def test_a_checkpoint_that_cannot_be_read_now_is_tried_again(run, capsys):
    failures = iter([MachineError("model.safetensors: Input/output error")])

    def fail_once(step):
        if error := next(failures, None):
            raise error

    assert scored_steps(run, during=fail_once) == [4, 8, 12]
    assert "model.safetensors: Input/output error; trying again" in capsys.readouterr().out


def test_a_checkpoint_whose_files_cannot_be_verified_now_is_tried_again(run, capsys, monkeypatch):
    """Nor does an older one take its place."""
    failures, whole = iter([MachineError("model.safetensors: Input/output error")]), saved.verify

    def verify(folder, *more):
        if error := next(failures, None):
            raise error
        return whole(folder, *more)

    monkeypatch.setattr(saved, "verify", verify)

    def score(step):
        return {"piqa/acc": saved.SavedRun.open(run, step).state.step / 100}

    follow.follow(run, SETTINGS, score, alone())
    printed = capsys.readouterr().out
    assert "Input/output error; trying again" in printed and "checkpoints scored: 3" in printed
    failures = iter([MachineError("model.safetensors: Input/output error")])
    with pytest.raises(MachineError):
        saved.SavedRun.open(run)


def test_scores_that_a_full_disk_did_not_take_are_no_success(run, capsys, monkeypatch):
    """Those that find room later are written with the next ones."""
    full, opened = [True], os.open

    def open_file(path, *more):
        if str(path).endswith(EVALUATION_NAME) and more[0] & os.O_WRONLY and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *more)

    monkeypatch.setattr(os, "open", open_file)
    with pytest.raises(MachineError, match=r"^cannot write .*evaluation\.jsonl; the same command"):
        scored_steps(run)
    assert capsys.readouterr().out.count("(No space left on device); scoring continues") == 1
    assert scored_steps(run, during=lambda step: full.__setitem__(0, step < 8)) == [4, 8, 12]
    assert len((run / EVALUATION_NAME).read_text().splitlines()) == 3


def test_a_run_none_of_whose_checkpoints_can_be_scored(run):
    def score(step):
        raise UserError("tasks: an item cannot be scored")

    with pytest.raises(UserError, match=r"none of the 3 checkpoints of .* could be scored"):
        follow.follow(run, SETTINGS, score, alone())


def test_scores_of_a_few_items_replace_none_of_all(run):
    scored_steps(run)
    follow.follow(run, SETTINGS | {"limit": 2}, lambda step: {"piqa/acc": 0.9, "piqa/f1": 0.8}, alone())
    row = next(row for row in read_metrics(run) if row["step"] == 8)
    assert (row["evaluation/piqa/acc"], row["evaluation/piqa/f1"]) == (0.08, 0.8)
    assert Columns(run)["evaluation/piqa/acc"][1].tolist() == [0.04, 0.08, 0.12]


def test_readers_of_a_run_see_the_scores(run, tmp_path):
    before = {row["step"]: row for row in read_metrics(run)}
    scored_steps(run)
    after = {row["step"]: row for row in read_metrics(run)}
    assert after[8] == before[8] | {"evaluation/piqa/acc": 0.08} and after[7] == before[7]
    steps, values = Columns(run)["evaluation/piqa/acc"]
    assert steps.tolist() == [4, 8, 12] and np.allclose(values, [0.04, 0.08, 0.12])
    assert "evaluation/piqa/acc" not in {name for row in read_metrics(run / "metrics.jsonl") for name in row}
    assert plot([str(run), "--out", str(tmp_path / "plot.png")]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:9]))  # the run has fallen back, and is at step 9
    assert max(row["step"] for row in read_metrics(run) if "evaluation/piqa/acc" in row) == 8


def test_a_retrained_step_is_scored_again(run):
    scored_steps(run)
    manifest = next((run / "checkpoints/step_000012").glob("*manifest*"))
    manifest.write_text(manifest.read_text() + "\n")
    follower = Follower(run, SETTINGS)
    assert follower.next().step == 12 and follower.finished()


def test_a_run_that_is_not_finished_is_waited_for(run):
    shutil.rmtree(run / "checkpoints/step_000012")
    follower = Follower(run, SETTINGS)
    assert not follower.finished() and follower.next().step == 4
    assert not Follower(run.parent / "nothing", SETTINGS).finished()


class Clock:
    """Time passes only while the follower sleeps, and something may happen meanwhile."""

    def __init__(self, monkeypatch, happens=lambda now: None):
        self.now, self.happens = 0.0, happens
        monkeypatch.setattr(follow, "POLL_SECONDS", 10)
        monkeypatch.setattr(follow, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 100_000, "waits forever"
        self.happens(self.now)


@pytest.fixture
def unfinished(run, tmp_path):
    """A run whose last checkpoint is not there yet, but in tmp_path/last."""
    (run / "checkpoints/step_000012").rename(tmp_path / "last")
    return run


def test_a_run_that_is_gone_ends_its_follower(unfinished, monkeypatch):
    clock = Clock(monkeypatch)
    said = (
        r"^model: .*run has 8 of 12 steps, no process trains it, and nothing was written for 600 s; continue "
        r"the run and follow it again, or wait longer with --follow_timeout$"
    )
    with pytest.raises(UserError, match=said):
        follow.follow(unfinished, SETTINGS, lambda step: {"piqa/acc": step / 100}, alone(), timeout=600)
    assert clock.now == 600
    assert len((unfinished / EVALUATION_NAME).read_text().splitlines()) == 2, "scored before"


def test_a_run_that_never_begins_ends_its_follower(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(UserError, match=r"/run has not begun within 3,600 s; continue the run"):
        follow.follow(tmp_path / "run", SETTINGS, lambda step: {}, alone())
    assert clock.now == follow.TIMEOUT == 3600


def test_a_trainer_that_writes_nothing_is_waited_for(unfinished, monkeypatch):
    """It holds the run's folder: for 5,000 s here."""
    lock = RunLock(unfinished)
    clock = Clock(monkeypatch, lambda now: lock.release() if now == 5000 else None)
    with pytest.raises(UserError, match="no process trains it"):
        follow.follow(unfinished, SETTINGS, lambda step: {}, alone(), timeout=600)
    assert clock.now == 5400, "when it is asked the next time"
    RunLock(unfinished).release()  # the follower keeps no lock of the trainer's


def test_a_requeued_job_has_its_time_to_start(unfinished, tmp_path, monkeypatch):
    """It writes to its folder 500 s after the follower's last score, and its last checkpoint 500 s later."""

    def happens(now):
        if now == 500:
            with (unfinished / "metrics.jsonl").open("a") as file:
                file.write('{"step": 9}\n')
        elif now == 1000:
            (tmp_path / "last").rename(unfinished / "checkpoints/step_000012")

    clock, steps = Clock(monkeypatch, happens), []
    follow.follow(unfinished, SETTINGS, lambda step: steps.append(step) or {}, alone(), timeout=600)
    assert steps == [4, 8, 12] and clock.now == 1000


def test_bad_input(run, tmp_path, capsys):
    pytest.importorskip("lm_eval")

    def line(*arguments):
        return refusal(capsys, command.main, *arguments, "--follow", "--tasks", "piqa")

    assert "--follow scores each checkpoint" in line(run, "--step", "8")
    assert "is not a folder; give a run that trains" in line(tmp_path / "no/run")
    assert "follow_timeout: '0' is not valid" in line(run, "--follow_timeout", "0")
    alone_given = refusal(capsys, command.main, str(run), "--follow_timeout", "60")
    assert "follow_timeout: 60 is for --follow" in alone_given
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "llama"}')
    assert "not of" in line(tmp_path / "hf")


@pytest.mark.slow
def test_scores_are_those_of_the_command(run, tmp_path):
    pytest.importorskip("lm_eval")
    given = [str(run), "--data_dir", str(write_data_sets(tmp_path / "data")), "--tasks", "piqa,arc_easy"]
    assert command.main([*given, "--follow"]) == 0
    assert command.main([*given, "--step", "8", "--out", str(tmp_path / "out.json")]) == 0
    row = next(row for row in read_metrics(run) if row["step"] == 8)
    for name, value in json.loads((tmp_path / "out.json").read_text())["scores"].items():
        assert row[f"evaluation/{name}"] == value
