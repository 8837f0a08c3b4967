"""Hooks of a user's own: by --hooks and by train(hooks=…); what they are given; what is no hook."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_steps
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.state import read_features
from pretrain.config.command_line import parse_command_line
from pretrain.metrics.file import read_metrics
from pretrain.run.hooks import Hook, HookResult, load_hooks
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refused
from tests.helpers.training import build, curve, fit, nano_run, session

NOTED: list[tuple[int, dict[str, Any]]] = []


class Notes(Hook):
    """Notes the row of each step."""

    name = "notes"

    def __init__(self, session):
        NOTED.clear()

    def is_due(self, step):
        return True

    def run(self, engine, state, row):
        NOTED.append((state.step, dict(row)))
        return super().run(engine, state, row)


class Alike(Notes):
    name = "validation"


class Counting(Hook):
    """Counts in a tensor, in place."""

    name = "counting"

    def __init__(self, session):
        self.count = torch.zeros(2, 3, dtype=torch.int64)

    def before_step(self, engine, state):
        self.count += 1
        return super().before_step(engine, state)

    def state(self):
        return {"counting/count": self.count.t()}

    def restore(self, tensors):
        NOTED.append((0, {"restored": tensors["counting/count"].tolist()}))
        self.count = tensors["counting/count"].t()


def noted(run, hooks=(), close=False):
    opened = build(run, 1, hooks)
    fit(opened)
    if close:
        opened.trainer.close()
    return NOTED


def test_what_a_hook_keeps_is_that_of_the_checkpoints_step(small_folder, tmp_path):
    """Whole numbers, laid out in any way, and changed while the checkpoint is written."""
    settings = ("--steps 6", "--checkpoint.every 2", "--hooks tests.pretrain.run.test_hooks:Counting")
    run = nano_run(small_folder, tmp_path, *settings)
    run_distributed(noted, 1, run)
    for step in (4, 6):
        kept = read_features(run.folder / f"checkpoints/step_{step:06d}")["counting/count"]
        assert kept.shape == (3, 2) and kept.dtype == torch.int64 and kept.eq(step).all()
    found = run_distributed(noted, 1, replace(run, steps=8))[0]
    assert (0, {"restored": [[6, 6]] * 3}) in found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_is_given_the_loss_and_the_norm_of_the_step(small_folder, tmp_path, ranks):
    settings = ("--steps 5", "--hooks tests.pretrain.run.test_hooks:Notes")
    run = nano_run(small_folder, tmp_path, *settings)
    for rank in run_distributed(noted, ranks, run):
        rows = {row["step"]: row for row in read_metrics(run.folder)}
        assert [step for step, _ in rank] == [1, 2, 3, 4, 5] == [*rows]
        for step, row in rank:
            expected = {name: rows[step].get(name) for name in ("train_loss", "grad_norm", "val_loss")}
            assert {name: row.get(name) for name in expected} == expected


def test_the_numbers_are_those_without_it(small_folder, tmp_path):
    runs = [nano_run(small_folder, tmp_path, "--steps 5 --name", name) for name in ("without", "with")]
    assert run_distributed(session, 1, runs[0], 1)[0] == ([], None)
    assert run_distributed(noted, 1, runs[1], [Notes])[0]
    assert curve(runs[0].folder) == curve(runs[1].folder)


def test_the_example_remembers_the_best_loss(small_folder, tmp_path):
    settings = "--validation.every 2 --checkpoint.every 0 --hooks examples.best_loss:BestLoss"
    for steps in ("4", "6"):
        run = nano_run(small_folder, tmp_path, settings, "--steps", steps)
        assert run_distributed(session, 1, run, 1)[0][1] is None
    losses = {row["val_loss"]: row["step"] for row in read_metrics(run.folder) if "val_loss" in row}
    state = json.loads((run.folder / "checkpoints/step_000006/state.json").read_text())
    best = min(losses)
    assert state["records"]["best_loss"]["values"] == {"loss": best, "step": losses[best]}


RESULTS = {
    "none": HookResult({"probe/x": None}),
    "text": HookResult({"probe/x": "high"}),
    "list": HookResult({"probe/x": [1.0]}),
    "tensor": HookResult({"probe/x": torch.ones(2)}),
    "step": HookResult({"step": 3}),
    "path": HookResult({"probe": Path("x")}),
    "object": HookResult({"probe/heads": {1, 2}}),
    "dict": {"probe/x": 1.0},
    "nothing": None,
}


def returning(run, result, method):
    def give(self, engine, state, row=None):
        return RESULTS[result]

    with mock.patch.object(Notes, method, give):
        return session(run, 1, hooks=["tests.pretrain.run.test_hooks:Notes"])[1]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("none", "probe/x: None is not valid; give a number, or leave the value out"),
        ("text", "probe/x: 'high' is not valid"),
        ("list", "probe/x: [1.0] is not valid"),
        ("tensor", "a value of probe/x is no number"),
        ("step", "'step' is a value of the trainer's; give it another name"),
        ("path", "a value of probe is no number"),
        ("object", "a value of probe/heads is no number"),
        ("dict", "returned dict; return a HookResult"),
        ("nothing", "returned NoneType; return a HookResult"),
    ],
)
def test_what_cannot_be_read_again_is_not_written(small_folder, tmp_path, result, words):
    for method in ("run", "before_step"):
        run = nano_run(small_folder, tmp_path, f"--steps 2 --validation.every 0 --name {method}")
        error = run_distributed(returning, 1, run, result, method)[0]
        assert error.startswith("hooks: notes") and words in error
        assert not any("probe/x" in row for row in read_metrics(run.folder))


class Keeps(Hook):
    """Notes its events, and keeps the checkpoint of step 1."""

    name = "keeps"

    def __init__(self, session):
        NOTED.clear()

    def begin(self, report):
        NOTED.append(("begin", callable(report)))

    def checkpoint_saved(self, folder):
        NOTED.append(("saved", folder.name, verify(folder)))

    def may_prune(self, folder):
        return folder.name != "step_000001"

    def end(self, asked_to_stop):
        NOTED.append(("end", asked_to_stop()))
        return ["what it says"]

    def close(self):
        NOTED.append(("close",))


@pytest.mark.parametrize("background", ["true", "false"])
def test_it_follows_the_checkpoints(small_folder, tmp_path, background):
    settings = "--steps 4 --checkpoint.every 1 --checkpoint.keep_last 1 --checkpoint.background"
    run = nano_run(small_folder, tmp_path, settings, background)
    events = run_distributed(noted, 1, run, [Keeps], close=True)[0]
    saved = [("saved", f"step_{step:06d}", None) for step in (1, 2, 3, 4)]
    assert events == [("begin", True), *saved, ("end", False), ("close",)]
    assert checkpoint_steps(run.folder) == [1, 4]


FAILING = [
    ("nope:X", "hooks: 'nope:X': nope cannot be imported (ModuleNotFoundError: No module named 'nope')"),
    ("broken:X", "hooks: 'broken:X': broken cannot be imported (ValueError: no luck)"),
    ("mine:Hok", "hooks: 'mine:Hok': Hok does not exist; did you mean 'Hook'?"),
    ("mine:number", "hooks: 'mine:number': number is no class of pretrain.run.hooks.Hook"),
    ("mine:dict", "hooks: 'mine:dict': dict does not exist"),
]


@pytest.mark.parametrize(("name", "line"), FAILING)
def test_what_is_no_hook(monkeypatch, tmp_path, name, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise ValueError('no luck\\nat all')\n")
    (tmp_path / "mine.py").write_text("from pretrain import Hook\nnumber = 3\n")
    with pytest.raises(UserError) as error:
        load_hooks([name])
    assert str(error.value) == line
    assert load_hooks(["mine:Hook"]) == [Hook]


@pytest.mark.parametrize("value", ["nope", "a b:C", "a:", "[3]"])
def test_what_is_no_name_of_a_hook(value):
    with refused("hooks"):
        parse_command_line(["--hooks", value])


def test_two_of_one_name(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--hooks tests.pretrain.run.test_hooks:Alike")
    line = run_distributed(session, 1, run, 1)[0][1]
    assert line == "hooks: two are called 'validation'; give each its own name"
