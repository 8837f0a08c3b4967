"""Flags and recipe files, and the messages for bad ones."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from tests.helpers.launch import ROOT


def parse(*arguments: str) -> RunConfig:
    return parse_command_line(list(arguments)).run


def test_flags_win_over_the_recipe_in_any_order(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("steps: 7\noptimizer: {learning_rate: 3e-4, weight_decay: 0}\n")
    for arguments in (["--config", str(recipe), "--steps", "9"], ["--steps", "9", f"--config={recipe}"]):
        run = parse(*arguments)
        assert (run.steps, run.optimizer.learning_rate, run.optimizer.weight_decay) == (9, 3e-4, 0)
        assert run.recipe == "mine"


def test_every_field_is_documented(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for field in dataclasses.fields(RunConfig):
        assert f"--{field.name}" in text
    assert "Optimizer steps in the whole run." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stesp", "3"], "--stesp: unknown flag; did you mean '--steps'?"),
        (["--optimizer.learning_rat", "3"], "did you mean '--optimizer.learning_rate'?"),
        (["--steps", "many"], "steps"),
        (["--steps", "0"], "steps: 0 is not valid; give a positive number"),
        (["--schedule.kind", "polynomial"], "'cosine', 'linear', 'wsd'"),
        (["--config", "125m"], "no recipe or file '125m'"),
        (["--config"], "config: no value given"),
        (["--model", "prism-125m"], "prism-124m"),
        (["--heads", "3x2"], "a schedule for 2 layers"),
        (["--heads", "2x5,5"], "5"),
        (["--architecture.nrom", "layernorm"], "did you mean 'norm'?"),
        (["--model", "nope.json"], "cannot read 'nope.json'"),
        (["--name", "a/b"], "name: 'a/b' is not valid"),
        (["--optimizer.betas", "[0.9, 1.5]"], "optimizer.betas: 1.5"),
        (["--micro_batch", "-1"], "micro_batch: -1"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    with pytest.raises(UserError) as caught:
        parse(*arguments).build_model_config()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "stepz: unknown key in"),
        ("optimizer: {lerning_rate: 1}", "did you mean 'learning_rate'?"),
        ("optimizer: 3", "is not a mapping"),
        ("- 1", "it must be a mapping"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_bad_recipe(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        parse("--config", str(tmp_path / "bad.yaml"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_command_exits_with_2_and_prints_the_merged_configuration():
    bad = subprocess.run(
        [sys.executable, "pretrain/main.py", "--stesp", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert bad.returncode == 2 and bad.stderr == "error: --stesp: unknown flag; did you mean '--steps'?\n"
    shown = subprocess.run(
        [sys.executable, "pretrain/main.py", "--config", "124m", "--steps", "5", "--print_config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    printed = yaml.safe_load(shown.stdout)
    assert (
        printed["steps"] == 5
        and printed["model"] == "prism-124m"
        and printed["optimizer"]["learning_rate"] == 6e-4
    )
