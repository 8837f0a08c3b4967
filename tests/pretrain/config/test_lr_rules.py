"""Rules: what they match, what the factor is at each step, and the message for each bad one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.errors import UserError
from model.presets import preset
from model.transformer import Transformer
from pretrain.config.command_line import parse_command_line
from pretrain.config.lr_rules import NAMED_RULES, LearningRateRule, parse_rules
from pretrain.config.sections import LLRConfig
from pretrain.config.sources import load_run_config
from pretrain.optim.groups import GroupRates, build_optimizer, parameter_groups, run_groups
from pretrain.optim.schedule import RuleSchedule
from tests.helpers.refusals import refused

ROOT = Path(__file__).resolve().parents[3]
UPPER_QK = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25}
UPPER_QK |= {"hold": 8, "ramp": 4}


def rule(**changes):
    return {key: value for key, value in {**UPPER_QK, **changes}.items() if value is not None}


def run_with(*rules, model="gpt2-nano", steps=100, **flags):
    more = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return parse_command_line(
        [
            "--config",
            "micro",
            "--model",
            model,
            "--steps",
            str(steps),
            "--lr_rules",
            json.dumps(list(rules)),
            *more,
        ]
    ).run


def groups_of(*rules, model="gpt2-nano", **flags):
    run = run_with(*rules, model=model, **flags)
    return {group.name: set(group.parameters) for group in run_groups(run, run.build_model_config())}


def names(template, layers, parts):
    return {template.format(layer=layer, part=part) for layer in layers for part in parts}


WEIGHTS = "layers.{layer}.attention.{part}.weight"
BIASES = "layers.{layer}.attention.{part}.bias"


def test_no_rules_leave_the_groups_as_they_were():
    assert list(groups_of()) == ["base/decay", "base/no_decay"]


def test_the_papers_rule_takes_exactly_the_matrices():
    """Four layers: 2 and 3 are the upper half. Biases of q and k stay with the base."""
    groups = groups_of(rule())
    assert list(groups) == ["base/decay", "base/no_decay", "slow/decay"]
    assert groups["slow/decay"] == names(WEIGHTS, (2, 3), "qk")
    assert names(BIASES, range(4), "qk") <= groups["base/no_decay"]
    every = {name for name, _ in Transformer(preset("gpt2-nano")).named_parameters()}
    assert set.union(*groups.values()) == every and sum(map(len, groups.values())) == len(every)


def test_biases_follow_when_asked():
    groups = groups_of(rule(biases=True))
    assert groups["slow/no_decay"] == names(BIASES, (2, 3), "qk")


# Of five layers, counted from 0: the upper half are those with l >= L/2.
LAYERS = [("upper_half", {3, 4}), ("lower_half", {0, 1, 2}), ("1-3", {1, 2, 3}), (4, {4}), ([0, 4], {0, 4})]
LAYERS += [("0, 2-3", {0, 2, 3}), ([0, "2-3"], {0, 2, 3})]


@pytest.mark.parametrize(("layers", "expected"), LAYERS)
def test_layers(layers, expected):
    assert parse_rules(run_with(rule(layers=layers)).lr_rules)[0].layer_set(5) == expected


def test_all_layers():
    groups = groups_of(rule(layers="all"), model="prism-tiny", heads="3,6x2,12x3")
    assert groups["slow/decay"] == names(WEIGHTS, range(6), "qk")


def test_every_part_and_patterns():
    ffn = {f"layers.1.ffn.{part}.weight" for part in ("up", "down")}
    assert groups_of(rule(parameters=["ffn"], layers=1))["slow/decay"] == ffn
    norms = {f"layers.3.{part}_norm.{kind}" for part in ("attention", "ffn") for kind in ("weight", "bias")}
    assert groups_of(rule(parameters="norm", layers="3"))["slow/no_decay"] == norms
    everywhere = groups_of(rule(parameters=["norm"], layers="all"))["slow/no_decay"]
    assert "final_norm.weight" in everywhere and len(everywhere) == 4 * 4 + 2
    embeddings = {"token_embedding.weight", "position_embedding.weight"}
    assert groups_of(rule(parameters=["embedding"], layers="all"))["slow/no_decay"] == embeddings
    untied = {"architecture": '{"tie_embeddings": false}'}
    assert groups_of(rule(parameters=["output"], layers="all"), **untied)["slow/decay"] == {"output.weight"}
    assert groups_of(rule(parameters=["v", "o"], layers="0"))["slow/decay"] == names(WEIGHTS, (0,), "vo")
    pattern = groups_of(rule(parameters=["layers.*.attention.?.bias"], layers="upper_half"))
    assert pattern["slow/no_decay"] == names(BIASES, (2, 3), "qkvo")


def test_the_first_match_wins():
    groups = groups_of(
        {"name": "one", "parameters": ["q"], "layers": 3, "scale": 1},
        rule(),
        {"name": "rest", "parameters": ["*"], "scale": 0.5},
    )
    assert groups["one/decay"] == names(WEIGHTS, (3,), "q")
    assert groups["slow/decay"] == names(WEIGHTS, (2, 3), "qk") - groups["one/decay"]
    assert list(groups) == ["one/decay", "slow/decay", "rest/decay", "rest/no_decay"]


def test_depth_decay_makes_a_group_a_layer():
    run = run_with(rule(depth_decay=0.5, layers="1-3", hold=None, ramp=None))
    groups = run_groups(run, run.build_model_config())
    slow = [group for group in groups if group.rule]
    assert [group.name for group in slow] == [f"slow/layer_{layer}/decay" for layer in (1, 2, 3)]
    rates = GroupRates(groups, run)
    base = rates.compute("base/decay", 50)[0]
    assert [rates.compute(group.name, 50)[0] / base for group in slow] == pytest.approx([0.25, 0.125, 0.0625])


def test_depth_counts_from_the_lowest_layer_with_such_a_parameter():
    run = run_with(
        rule(depth_decay=0.5, layers="all", hold=None, ramp=None), model="prism-nano", heads="0,3,4,4"
    )
    groups = [group for group in run_groups(run, run.build_model_config()) if group.rule]
    assert [(group.name, group.depth) for group in groups] == [
        (f"slow/layer_{layer}/decay", layer - 1) for layer in (1, 2, 3)
    ]


def test_factor_by_hand():
    schedule = RuleSchedule(parse_rules([rule()])[0], 100)
    by_hand = [0.25] * 8 + [0.4375, 0.625, 0.8125, 1.0] + [1.0] * 88
    assert [schedule.factor(step) for step in range(100)] == by_hand
    # 4 % and 1 % of 11,000 steps
    paper = RuleSchedule(parse_rules(["upper_qk"])[0], 11_000)
    assert (paper.hold, paper.ramp, paper.release_step()) == (440, 110, 440)
    assert paper.factor(439) == 0.25 and paper.factor(549) == 1.0
    assert paper.factor(440) == pytest.approx(0.25 + 0.75 / 110)
    forever = RuleSchedule(parse_rules([rule(hold=None, ramp=None)])[0], 100)
    assert {forever.factor(step) for step in range(100)} == {0.25} and forever.release_step() is None


def test_a_layers_own_scale_ends_with_the_ramp():
    schedule = RuleSchedule(parse_rules([rule(depth_decay=0.5)])[0], 100)
    by_hand = [0.0625] * 8 + [0.0625 + 0.9375 * i / 4 for i in (1, 2, 3)] + [1.0] * 89
    assert [schedule.factor(step, depth=2) for step in range(100)] == pytest.approx(by_hand)


def test_released_by_maturity():
    schedule = RuleSchedule(parse_rules([rule(release="maturity", hold=4, latest=12, ramp=2)])[0], 100)
    assert schedule.release_step() is None
    assert (schedule.release_step(1), schedule.release_step(7), schedule.release_step(50)) == (4, 7, 12)
    assert [schedule.factor(step, released=7) for step in range(5, 11)] == [0.25, 0.25, 0.625, 1, 1, 1]
    # Undecided it is forced at the latest step.
    assert [schedule.factor(step) for step in range(10, 15)] == [0.25, 0.25, 0.625, 1, 1]
    assert NAMED_RULES["upper_qk_maturity"]["latest"] == 0.12
    plain = LearningRateRule(name="m", parameters=("q",), scale=0.25, release="maturity")
    assert plain.latest == 0.12


def test_weight_decay_follows_the_rate_or_not():
    """One step of the real optimizer with zero gradients: what is left is the decay (AdamW, algorithm 2)."""
    for follows in (True, False):
        run = run_with(rule(decay_with_lr=follows))
        model = Transformer(preset("gpt2-nano"))
        optimizer = build_optimizer(
            parameter_groups(model, run.optimizer, parse_rules(run.lr_rules)), run.optimizer, False
        )
        rates = GroupRates(run_groups(run, run.build_model_config()), run)
        rates.write(optimizer, step=4)
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        base = rates.compute("base/decay", 4)[0]
        for name, factor in (
            ("layers.3.attention.q.weight", 0.25 if follows else 1),
            ("layers.0.ffn.up.weight", 1),
        ):
            after = dict(model.named_parameters())[name].detach().double()
            torch.testing.assert_close(after, before[name] * (1 - base * factor * 0.1), rtol=1e-6, atol=1e-9)


def test_a_decay_apart_from_the_rate_stays_the_same():
    run = run_with(rule(decay_with_lr=False, depth_decay=0.5, layers="1-3"))
    rates = GroupRates(run_groups(run, run.build_model_config()), run)
    for step in (4, 9, 50):  # held, in the ramp, released
        base_rate, base_decay = rates.compute("base/decay", step)
        for layer in (1, 2, 3):
            rate, decay = rates.compute(f"slow/layer_{layer}/decay", step)
            assert rate * decay == pytest.approx(base_rate * base_decay)


SLOW = "lr_rules.slow"
MATURITY, OTHER = {"release": "maturity"}, {"name": "all", "layers": "all"}
FROZEN = {"freeze": True, "scale": None}
BAD = [  # changes of rules, and what is said
    ([{"layers": "9-12"}], f"{SLOW}.layers: layer 12 is outside the model, whose layers are 0 to 3"),
    ([{"layers": "3-1"}], f"{SLOW}.layers: '3-1' ends before it begins; write 1-3"),
    ([{"layers": "top"}], f"{SLOW}.layers: 'top' is not valid; give all, upper_half, lower_half"),
    ([{"parameters": ["output"]}], "parameters output in layers upper_half of 4 match nothing"),
    ([{"parameters": ["layers.*.attn.*"]}], "match nothing; the model has embedding, ffn"),
    ([{"parameters": ["nrom"]}], f"{SLOW}.parameters: 'nrom' is unknown; did you mean 'norm'?"),
    ([{"scale": 0}], f"{SLOW}.scale: 0 is not valid; give a positive number (freeze: true stops"),
    ([{"scale": 0.5, "freeze": True}], f"{SLOW}.freeze: true goes with no scale"),
    ([{"hold": 97}], f"{SLOW}.hold: 97 steps and a ramp of 4 go beyond the run of 100 steps; give at most"),
    ([{"hold": 2.5}], f"{SLOW}.hold: 2.5 is neither a fraction below 1 nor a whole number of steps"),
    ([{"hold": 0.004, "ramp": 0}], f"{SLOW}.hold: 0.004 of a run of 100 steps is less than one step"),
    ([{"hold": None}], f"{SLOW}.ramp: without a hold the rule never ends"),
    ([{"latest": 0.2}], f"{SLOW}.latest: it is for release: maturity"),
    ([{"depth_decay": 0.9, "parameters": ["norm"], "layers": "all"}], "final_norm.weight lies outside"),
    ([{"name": "base"}], "lr_rules.name: 'base' is what matches no rule"),
    ([{}, {}], "lr_rules: two rules are called 'slow'"),
    ([{"scal": 1}], f"{SLOW}.scal: unknown; did you mean 'scale'?"),
    (["upper_kq"], "lr_rules[0]: there is no rule called 'upper_kq'; did you mean 'upper_qk'?"),
    ([OTHER, {}], f"{SLOW}: every parameter it matches is taken by all before it (the first match wins)"),
]


BAD_MATURITY = [
    ({"hold": 20}, f"{SLOW}.hold: 20 steps are more than latest, 12"),
    ({"latest": 99}, f"{SLOW}.latest: 99 steps and a ramp of 4 go beyond the run"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MATURITY)
def test_bad_releases_by_maturity_are_one_clear_line(changes, message):
    test_bad_rules_are_one_clear_line([MATURITY | changes], message)


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_rules_are_one_clear_line(changes, message):
    with refused(message):
        run = run_with(*(each if isinstance(each, str) else rule(**each) for each in changes))
        GroupRates(run_groups(run, run.build_model_config()), run)


def test_from_a_recipe_and_back(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model: gpt2-nano\nlr_rules:\n  - upper_qk\n"
        "  - {name: slow, parameters: [v], layers: 0-1, scale: 0.5}\n"
    )
    run = parse_command_line(["--config", str(recipe)]).run
    assert [r.name for r in parse_rules(run.lr_rules)] == ["upper_qk", "slow"]
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    assert load_run_config(tmp_path / "config.yaml") == run


def test_the_plot_and_its_table(tmp_path):
    from pretrain.plots.learning_rates import plot_learning_rates

    run = run_with(rule(), rule(name="late", parameters=["v"], release="maturity", hold=None), steps=100)
    lines = plot_learning_rates(run, tmp_path / "new" / "lr.png")
    assert (tmp_path / "new" / "lr.png").stat().st_size > 10_000
    cells = [line.split()[:4] for line in lines[1:-1]]
    assert [row[0] for row in cells] == ["base/decay", "base/no_decay", "slow/decay", "late/decay"]
    assert cells[2][1:3] == [f"{4 * 48 * 48:,}", "4"]
    assert lines[3].endswith("step 8, ramp 4") and lines[4].endswith("by maturity, step 0 to 12, ramp 4")
    assert "wrote" in lines[-1] and not any("llr" in line for line in lines)
    spectral = dataclasses.replace(run, llr=LLRConfig(apply="each"))
    *_, measured, _ = plot_learning_rates(spectral, tmp_path / "new" / "llr.png")
    assert measured.startswith("llr.apply each: while training, measured factors of 1 to 5 multiply")
    with pytest.raises(UserError, match="is not the name of a picture"):
        plot_learning_rates(run, tmp_path / "lr.nope")


@pytest.mark.slow
def test_the_commands_flag_draws_and_stops(tmp_path):
    def main(*arguments):
        command = [sys.executable, ROOT / "pretrain" / "main.py", "--runs_dir", tmp_path / "runs", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    settings = "--config micro --model gpt2-270m --lr_rules [upper_qk] --steps 1000 --plot_lr lr.png"
    drawn = main(*settings.split())
    assert drawn.returncode == 0, drawn.stderr
    # 20 matrices of 960 x 960; 4 % and 1 % of 1,000 steps
    assert "upper_qk/decay   18,432,000       20" in drawn.stdout and "step 40, ramp 10" in drawn.stdout
    assert (tmp_path / "lr.png").is_file() and not (tmp_path / "runs").exists()
