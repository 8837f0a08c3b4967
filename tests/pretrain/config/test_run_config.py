"""What a run is: the default, the shipped recipes, a YAML round trip, its model."""

import dataclasses
import json
import re

import pytest
import yaml

from docs import reference
from model.presets import preset
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import RECIPES, load_run_config
from pretrain.optim.groups import GroupRates, run_groups
from pretrain.optim.schedule import LearningRateSchedule
from tests.helpers.refusals import refused


def parse(*arguments: str) -> RunConfig:
    return parse_command_line(list(arguments)).run


def test_growth_replaces_the_heads_of_any_depth_and_width():
    growing = ("--config", "micro", "--growth.criterion", "incrt")
    shallow = parse(*growing, "--architecture.num_layers", "3")
    assert shallow.build_model_config().heads == (1, 1, 1)
    assert shallow.most_heads() == parse("--config", "micro").most_heads()
    widths = ("--growth.head_dim", "16", "--architecture.block_width", "128,96,100,128")
    assert parse(*growing, *widths).build_model_config().head_dim == (16,) * 4


def test_every_setting_is_in_the_documentation():
    text = reference.settings_page()
    for section in dataclasses.fields(RunConfig):
        value = getattr(RunConfig(), section.name)
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for name in [f"{section.name}.{each}" for each in names] or [section.name]:
            assert re.search(rf"\b{re.escape(name)}\b", text), name


def test_default_recipe():
    run = parse()
    assert run == parse("--config", "modern-micro") and run.run_name == "modern-micro-prism-micro-s1"
    assert run.optimizer.kind == "muon" and run.build_model_config().qk_norm == "weighted"
    assert parse_command_line([]).ds_config == "ds_configs/zero2.json"


def test_the_default_recipe_changes_no_model_of_a_file(tmp_path):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(preset("prism-nano").to_json()))

    def model(*arguments):
        return parse(*arguments).build_model_config()

    for taken in ([], ["--config", "micro"]):
        assert model(*taken, "--model", str(file)) == preset("prism-nano")
    normalized = dataclasses.replace(preset("prism-nano"), qk_norm="plain")
    assert model("--model", str(file), "--architecture.qk_norm", "plain") == normalized
    for taken in (["--model", "prism-nano"], ["--config", "modern-micro", "--model", str(file)]):
        assert model(*taken).qk_norm == "weighted" and model(*taken).z_loss == 1e-4


@pytest.mark.parametrize("name", ["124m", "354m", "757m"])
def test_paper_recipes(name):
    # arXiv 2606.27449, table of models: tokens a batch, peak rate, total tokens.
    batch, rate, tokens = {
        "124m": (262144, 6.0e-4, 2.88e9),
        "354m": (262144, 3.0e-4, 10.49e9),
        "757m": (524288, 2.5e-4, 20.97e9),
    }[name]
    run = parse("--config", name)
    assert run.model == f"prism-{name}" and run.recipe == name
    assert run.global_batch_tokens == batch and run.optimizer.learning_rate == rate
    assert run.steps * run.global_batch_tokens == pytest.approx(tokens, rel=2e-3)
    assert run.optimizer.betas == (0.9, 0.95) and run.optimizer.weight_decay == 0.1
    assert run.schedule.kind == "cosine" and run.schedule.warmup == 0.025
    assert run.build_model_config().context_length == 1024


@pytest.mark.parametrize(("size", "width"), [("124m", 768), ("354m", 1024), ("757m", 1536)])
def test_modern_recipes_are_the_small_one_at_another_width(size, width):
    small, run, paper = (
        parse("--config", "modern-micro"),
        parse("--config", f"modern-{size}"),
        parse("--config", size),
    )
    assert (run.optimizer, run.muon) == (small.optimizer, small.muon)
    transfer = {"parametrization": "mup", "base_width": small.build_model_config().d_model}
    assert run.architecture == small.architecture | transfer
    kept = ("model", "data", "steps", "global_batch_tokens")
    assert [getattr(run, name) for name in kept] == [getattr(paper, name) for name in kept]
    rates = GroupRates(run_groups(run, run.build_model_config()), run)
    step = run.steps // 2
    assert rates.compute("base/muon", step)[0] == pytest.approx(
        small.muon.learning_rate / (width / 128) ** 0.5
    )
    assert rates.compute("base/no_decay", step)[0] == small.optimizer.learning_rate


@pytest.mark.parametrize("size", ["124m", "757m"])
def test_long_recipes_differ_in_the_context_alone(size):
    long, paper = parse("--config", f"long-{size}"), parse("--config", size)
    model = long.build_model_config()
    assert (model.context_length, model.rope_base) == (32768, 5e5)
    assert long.validation.sequences * 32768 == paper.validation.sequences * 1024
    same = {name: getattr(paper, name) for name in ("architecture", "validation", "recipe")}
    assert dataclasses.replace(long, **same) == paper


def test_head_progression_recipe():
    """The note's trainer: AdamW at 5e-5, linear decay without warmup, batches of 2, GPT-Neo blocks of
    2048."""
    run = parse("--config", "headprog")
    schedule = LearningRateSchedule(run.schedule, run.steps)
    assert run.optimizer.learning_rate == 5e-5 and run.optimizer.weight_decay == 0
    assert schedule.factor(0) == 1 - 1 / run.steps and schedule.factor(run.steps // 2 - 1) == 0.5
    model = run.build_model_config()
    assert run.global_batch_tokens == 2 * model.context_length and model.attention_scale == "none"


def test_yaml_round_trip(tmp_path):
    flags = "--heads 2x3,4x3 --architecture.norm layernorm --micro_batch 2 --optimizer.betas [0.8,0.9]"
    run = parse(*flags.split(" "))
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    assert load_run_config(tmp_path / "config.yaml") == run


def test_model_config_from_preset_heads_and_architecture():
    flags = (
        "--model prism-124m --heads 12x6,6x6 --architecture.context_length 512 --architecture.norm layernorm"
    )
    config = parse(*flags.split()).build_model_config(vocab_size=300)
    assert config.heads == (12,) * 6 + (6,) * 6
    assert (config.context_length, config.norm, config.vocab_size) == (512, "layernorm", 300)


def test_every_recipe_builds():
    for path in RECIPES.glob("*.yaml"):
        run = parse("--config", path.stem)
        if run.init_from is None:
            run.build_model_config()
            continue
        assert path.stem == "continue"  # of any weights, which must be named
        with refused("'SOURCE'", "give a run's folder", begins="init_from: "):
            run.build_model_config()
        assert yaml.safe_load(path.read_text())


def test_settings_of_what_is_turned_off_are_noted():
    assert parse("--config", "micro").unused_settings() == []
    assert parse("--config", "growth").unused_settings() == []
    off = parse("--config", "micro", "--llr.measure", "excess", "--llr.every", "9")
    assert off.unused_settings() == ["llr.measure, llr.every: not used, since llr.apply is none"]
    on = parse("--config", "micro", "--llr.measure", "excess", "--llr.apply", "each")
    assert on.unused_settings() == []
    (note,) = parse("--config", "growth", "--growth.criterion", "none").unused_settings()
    assert note.startswith("growth.") and note.endswith(": not used, since growth.criterion is none")
