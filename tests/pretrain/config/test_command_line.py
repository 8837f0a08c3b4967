"""Flags and recipe files, and the messages for bad ones."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from model.errors import UserError
from model.heads import parse_heads
from pretrain.config.command_line import OTHERWISE, parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import FLAGS, flatten, make_run
from tests.helpers.launch import ROOT
from tests.helpers.refusals import refused


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
        assert (f"--{field.name}" in text) == (field.name != "recipe")  # which --config sets
    assert "Optimizer steps in the whole run." in text
    assert "Without --config the recipe is modern-micro, which sets some of them" in " ".join(text.split())


BAD = {
    "--optimizer.learning_rat 3": "did you mean '--optimizer.learning_rate'?",
    "--optimizer.learning-rate 3": "did you mean '--optimizer.learning_rate'?",
    "--schedule.kind polynomial": "schedule.kind: 'polynomial' is not valid; give one of cosine, linear, wsd",
    "--compile ja": "compile: 'ja' is not valid; give one of auto, True, False",
    "--steps 3.5": "steps: 3.5 is not valid; give a whole number",
    "--learning_rate 1": "--learning_rate: unknown flag; did you mean '--optimizer.learning_rate' or",
    "--config": "--config: expected one argument",
    "--config=": "--config: '' is empty; give a value",
    "--model prism-125m": "prism-124m",
    "--heads 3x2": "a schedule for 2 layers",
    "--architecture.nrom layernorm": "did you mean '--architecture.norm'?",
    "--model nope.json": "cannot read 'nope.json'",
    "--llr.every 2.5 --llr.apply each": "llr.every: 2.5 is neither a fraction below 1 nor a whole",
    "--maturity.every 1.5": "maturity.every: 1.5 is neither a fraction below 1 nor a whole number of steps",
    "--optimizer.betas [0.9,1.5]": "optimizer.betas.1: 1.5",
    "--architecture.block_width 192,128,0,192": "architecture.block_width: '192,128,0,192' is not valid; "
    "give a number from 1 in layer 2, which has 0",
    "--architecture.ffn_width [256,128,64,-1]": "architecture.ffn_width: [256, 128, 64, -1] is not "
    "valid; give a number from 0 in layer 3, which has -1",
    "--architecture.rope_base x": "architecture.rope_base: 'x' is not valid; give n or nxN with numbers",
    "--architecture.ffn_width tapered(32)": "give multiple=32 or less",
    "--heads tapered(8,layers=5)": "a schedule for 5 layers",
    "--heads taperd(8)": "heads: 'taperd(8)' is not valid; 'taperd' is unknown",
    "--heads 1x4 --architecture.ffn_width 0x4 --steps 0x4": "steps: '0x4' is not valid",
}


@pytest.mark.parametrize(("arguments", "message"), BAD.items())
def test_bad_input_is_one_clear_line(arguments, message):
    with refused(message):
        parse(*arguments.split()).build_model_config()


def test_schedules_are_read_from_flags():
    """Whatever YAML makes of their text."""
    arguments = ["--architecture.ffn_width", "0x2,64x2", "--architecture.rotary_share", "0.5,1,0.25x2"]
    model = parse(*arguments, "--architecture.rope_base", "1e4x3,null", "--heads", "2x4").build_model_config()
    assert model.ffn_width == (0, 0, 64, 64) and model.rotary_share == (0.5, 1, 0.25, 0.25)
    assert model.rope_base == (1e4, 1e4, 1e4, None)
    assert parse("--architecture.ffn_width", "0x4").build_model_config().ffn_width == 0
    assert parse("--architecture.rope_base", "null").build_model_config().rope_base is None
    with refused("layer 0 has neither heads nor"):
        parse("--heads", "0x4", "--architecture.ffn_width", "0x4").build_model_config()


def test_heads_of_an_allocation_have_the_models_layers():
    run = parse("--heads", "prism(6)", "--architecture.head_dim", "16x4")
    assert run.build_model_config().heads == parse_heads("prism(6, layers=4)")
    deeper = ["--architecture.num_layers", "6", "--architecture.head_dim", "16x6"]
    assert parse("--heads", "prism(6)", *deeper).build_model_config().heads == parse_heads(
        "prism(6, layers=6)"
    )
    assert make_run(flatten(run.to_dict())) == run


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "--architecture.ffn_width tapered(100) --model uniform-micro8",
            ["the 8 layers' ffn_width add up to 832, 32 above"],
        ),
        ("--architecture.ffn_width tapered(384)", []),
        ("--architecture.ffn_width 100,200x3", []),
        (
            "--heads prism(8,multiple=3) --architecture.head_dim 16x4",
            ["the 4 layers' heads add up to 33, 1 above"],
        ),
        (
            "--architecture.block_width waist(128,multiple=64) --heads 8x4",
            ["the 4 layers' block_width have 16.8 % more parameters"],
        ),
        (  # 192 x 512 + 64 x 256 + 64 x 256 + 192 x 512 for 4 x 128 x 384
            "--heads 8x4 --architecture.block_width 192,64,64,192 "
            "--architecture.ffn_width ends(384,multiple=256)",
            ["the FFNs have "],
        ),
    ],
)
def test_a_budget_that_is_missed_is_described(given, expected):
    run = parse(*given.split())
    found = run.describe_budgets(run.build_model_config())
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


RECIPES = {
    "optimizer: {lerning_rate: 1}": "unknown key in",
    "optimizer: {learnig_rate: 1}": "did you mean 'optimizer.learning_rate'?",
    "optimizer: 3": "optimizer: 3 is not valid; give a mapping of its fields",
    "lr: 1": "lr: unknown key",
    "steps: null": "steps: None is not valid; give a whole number",
    "- 1": "it must be a mapping",
    "a: [": "is not valid YAML",
}


@pytest.mark.parametrize(("text", "message"), RECIPES.items())
def test_bad_recipe(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with refused(message):
        parse("--config", str(tmp_path / "bad.yaml"))


def test_the_command_exits_with_2():
    command = [sys.executable, "pretrain/main.py", "--stesp", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: --stesp: unknown flag; did you mean '--steps'?\n")


@pytest.fixture(scope="module")
def print_config():
    """main.py with --print_config and other arguments, without what it does to a process that runs it."""
    with mock.patch.object(sys, "path", [*sys.path]), mock.patch.dict(os.environ):
        from pretrain.main import main
    listener = mock.Mock(raising=contextlib.nullcontext)
    return lambda arguments: main([*arguments, "--print_config"], listener, 0)


def test_the_merged_configuration_is_printed(print_config, capsys):
    print_config(["--config", "124m", "--steps", "5"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed.keys() == {field.name for field in dataclasses.fields(RunConfig)} - {"recipe"}
    assert (printed["steps"], printed["model"]) == (5, "prism-124m")
    assert printed["optimizer"]["learning_rate"] == 6e-4


def test_what_is_printed_is_a_recipe(print_config, tmp_path, capsys):
    arguments = ["--config", "mini", "--lr_rules", "[upper_qk]", "--seed", "3"]
    print_config(arguments)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(capsys.readouterr().out)
    assert parse("--config", str(recipe)) == dataclasses.replace(parse(*arguments), recipe="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "7x4"], "heads: layer 0 has 7 heads"),
        (["--tensor_parallel", "3"], r"tensor_parallel: 3 does not divide attention width \(layer 0\) 128"),
        (["--global_batch_tokens", "300"], "not a multiple of the context length"),
        (["--lr_rules", "[{name: slow, parameters: [q], layers: 3-5, scale: 0.1}]"], "layer 5 is outside"),
        (["--compile", "true", "--ds_config", "ds_configs/zero3.json"], "compile: true is not valid"),
    ],
)
def test_what_does_not_fit_together_is_not_printed(print_config, capsys, arguments, message):
    with pytest.raises(UserError, match=message):
        print_config(arguments)
    assert capsys.readouterr().out == ""


def test_a_ds_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_command_line([]).ds_config == str(ROOT / "ds_configs/zero2.json")
    for name in ("nowhere.json", "x" * 300):
        assert parse_command_line(["--ds_config", name]).ds_config == name
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero2.json").write_text("{}")
    assert parse_command_line([]).ds_config == "ds_configs/zero2.json"


def test_verbose_is_a_flag_of_the_command_alone():
    plain, verbose = parse_command_line(["--steps", "5"]), parse_command_line(["--verbose", "--steps", "5"])
    assert (plain.verbose, verbose.verbose) == (False, True)
    assert plain.run == verbose.run and "verbose" not in verbose.run.to_yaml()


def test_the_help_has_every_setting_with_its_values(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    text = capsys.readouterr().out
    listed = re.findall(r"^  --([a-z_.]+) ", text, re.MULTILINE)
    assert set(FLAGS) - set(listed) == set(OTHERWISE)
    assert len(listed) == len(set(listed))
    for line in (
        "--optimizer.kind {adamw,muon}",
        "--compile {auto,true,false}",
        "--muon.heads {whole,each}|INT",
        "--steps INT ",
        "--architecture.ffn_width INT|LIST",
        "--sequence_parallel {true,false}",
    ):
        assert f"\n  {line}" in text
    assert text.index("\nParallelism:") < text.index("--tensor_parallel INT") < text.index("\noptimizer:")
