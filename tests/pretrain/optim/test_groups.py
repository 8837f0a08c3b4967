"""Which group every parameter is in, at stage 1 and at stage 3, and what a step does to it."""

import re

import pytest
import torch

from model.initialization import initialize
from model.parameters import parameter_specs
from model.presets import preset
from model.process_grid import ALONE
from model.transformer import Transformer
from pretrain.config.command_line import parse_command_line
from pretrain.config.sections import OptimizerConfig
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.optim.groups import GroupRates, build_optimizer, parameter_groups, run_groups
from pretrain.plan.micro_batch import plan_batch
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refused
from tests.helpers.training import engine_of


def expected_groups(config, decay_embeddings=False):
    """Every parameter's group, written down from the architecture and not from the code under test."""
    decay, no_decay = [], []
    (decay if decay_embeddings else no_decay).append("token_embedding.weight")
    if config.positions == "learned":
        (decay if decay_embeddings else no_decay).append("position_embedding.weight")
    biased = {"all": "qkvo", "output": "o", "none": ""}[config.attention_bias]
    for layer in range(config.num_layers):
        for part in "qkvo":
            decay.append(f"layers.{layer}.attention.{part}.weight")
            if part in biased:
                no_decay.append(f"layers.{layer}.attention.{part}.bias")
        for part in ("gate", "up", "down") if config.ffn == "swiglu" else ("up", "down"):
            decay.append(f"layers.{layer}.ffn.{part}.weight")
            if config.ffn_bias:
                no_decay.append(f"layers.{layer}.ffn.{part}.bias")
        for norm in ("attention_norm", "ffn_norm"):
            no_decay.append(f"layers.{layer}.{norm}.weight")
            if config.norm_bias:
                no_decay.append(f"layers.{layer}.{norm}.bias")
    no_decay.append("final_norm.weight")
    if config.norm_bias:
        no_decay.append("final_norm.bias")
    if not config.tie_embeddings:
        decay.append("output.weight")
    return {"base/decay": set(decay), "base/no_decay": set(no_decay)}


def names_by_group(groups):
    return {group["name"]: set(group["parameter_names"]) for group in groups}


@pytest.mark.parametrize("decay_embeddings", [False, True])
@pytest.mark.parametrize("change", [{}, {"tie_embeddings": False}])
@pytest.mark.parametrize("name", ["prism-nano", "gpt2-nano"])
def test_every_parameter_is_in_its_group(name, change, decay_embeddings):
    config = preset(name).replace(**change)
    groups = parameter_groups(Transformer(config), OptimizerConfig(decay_embeddings=decay_embeddings))
    assert names_by_group(groups) == expected_groups(config, decay_embeddings)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [
        ("base/decay", 0.1),
        ("base/no_decay", 0.0),
    ]


WIDE = "--architecture.parametrization mup --architecture.base_width 12 --architecture.attention_scale none"


@pytest.mark.parametrize(
    ("flags", "group", "rate"),
    [  # the model is four times as wide as its base
        ("", "base/hidden", 0.25),
        ("--optimizer.kind muon", "base/muon", 0.5),
        ("--optimizer.kind muon --muon.heads each", "base/muon", 0.5),
        ("--optimizer.kind muon --muon.scale spectral", "base/muon", 1.0),
        ("--optimizer.kind muon --muon.scale unit", "base/muon", 1.0),
    ],
)
def test_rates_of_a_wide_model(flags, group, rate):
    given = "--config micro --model gpt2-nano --steps 9 --schedule.kind wsd --schedule.warmup 0"
    given += f" --schedule.decay 3 {flags}"
    run = parse_command_line(f"{given} {WIDE} --architecture.tie_embeddings false".split()).run
    config = run.build_model_config(300)
    groups = run_groups(run, config)
    hidden = {name for name in parameter_specs(config) if re.search(r"\.(q|k|v|o|up|down)\.weight", name)}
    assert {name: set(g.parameters) for g in groups for name in [g.name]}[group] == hidden
    rates = GroupRates(groups, run)
    peak, decay = run.optimizer.learning_rate, run.optimizer.weight_decay
    expected = {group: (peak * rate, decay / rate), "base/decay": (peak, decay), "base/no_decay": (peak, 0)}
    for name, (learning_rate, weight_decay) in expected.items():
        assert rates.compute(name, 0) == pytest.approx((learning_rate, weight_decay))
    assert set(rates.groups) == set(expected)


@pytest.mark.parametrize(("kind", "suffix", "power"), [("adamw", "hidden", 1), ("muon", "muon", 0.5)])
def test_rates_follow_the_width_of_each_layer(kind, suffix, power):
    """With m the width of the layer over 12: rates of matrices / m^power, the decay stays; the weights begin
    with 0.02 / sqrt(m)."""
    given = f"--config micro {WIDE} --architecture.block_width 24,48,96,24 --heads 2x4 --model prism-nano"
    run = parse_command_line(f"{given} --optimizer.kind {kind}".split()).run
    model = run.build_model_config(300)
    rates = GroupRates(run_groups(run, model), run)
    assert [name for name in rates.groups if name.endswith(suffix)] == [
        f"base/width_{width}/{suffix}" for width in (24, 48, 96)
    ]
    base, decay = rates.compute("base/no_decay", 5)[0], run.optimizer.weight_decay
    network = Transformer(model)
    initialize(network, 0)
    parameters = dict(network.named_parameters())
    for width, layers in ((24, "03"), (48, "1"), (96, "2")):
        name, m = f"base/width_{width}/{suffix}", width / 12
        assert rates.compute(name, 5) == pytest.approx((base / m**power, decay * m**power))
        matrices = set(rates.groups[name].parameters)
        parts = [f"attention.{part}" for part in "qkvo"] + ["ffn.gate", "ffn.up", "ffn.down"]
        assert matrices == {f"layers.{layer}.{part}.weight" for layer in layers for part in parts}
        for layer in layers:
            drawn = parameters[f"layers.{layer}.ffn.up.weight"].std().item()
            assert drawn == pytest.approx(0.02 / m**0.5, rel=0.05)


def engine_groups(stage):
    given = "--model gpt2-nano --global_batch_tokens 128 --precision fp32 --steps 10 --schedule.warmup 2"
    run = parse_command_line(["--config", "micro", *given.split(), "--optimizer.learning_rate", "1e-3"]).run
    config = run.build_model_config(300)
    plan = plan_batch(run.global_batch_tokens, 1, config, torch.distributed.get_world_size(), 1 << 30, "cpu")
    merged = merge_ds_config(read_ds_config(f"ds_configs/zero{stage}.json"), run, plan, False, config)
    engine = engine_of(run, config, merged, ALONE)
    rates = GroupRates(run_groups(run, config), run).write(engine.optimizer, step=0)
    groups = engine.optimizer.param_groups
    written = [(g["name"], g["lr"], g["weight_decay"]) for g in groups]
    return names_by_group(groups), rates, written, moved_with(engine, config)


def moved_with(engine, config):
    """Group name -> the parameters that a step changes when only that group has a learning rate."""
    from deepspeed.utils import safe_get_full_fp32_param

    def weights():
        return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}

    # All tokens and positions occur, so that every parameter has a gradient.
    tokens = torch.arange(300).expand(2, -1)[:, : config.context_length + 1].contiguous()
    found = {}
    for chosen in engine.optimizer.param_groups:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 if group is chosen else 0.0
        before = weights()
        loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        after = weights()
        found[chosen["name"]] = {name for name in before if not torch.equal(before[name], after[name])}
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_inside_the_engine(stage):
    for names, rates, groups, moved in run_distributed(engine_groups, 2, stage, timeout=120):
        assert names == moved == expected_groups(preset("gpt2-nano"))  # as labelled, and as stepped
        assert rates == {"base/decay": 5e-4, "base/no_decay": 5e-4}
        assert groups == [("base/decay", 5e-4, 0.1), ("base/no_decay", 5e-4, 0.0)]


def test_one_step_is_adamw():
    """Against the update written out in float64 (Loshchilov & Hutter 2019, algorithm 2)."""
    config = preset("prism-nano")
    network = Transformer(config)
    initialize(network, 3)
    config_ = OptimizerConfig(learning_rate=1e-2)
    optimizer = build_optimizer(parameter_groups(network, config_), config_, offload=False)
    before = {name: p.detach().double().clone() for name, p in network.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=generator)
    network(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    decayed = expected_groups(config)["base/decay"]
    for name, parameter in network.named_parameters():
        gradient = parameter.grad.double()
        # First step: both bias-corrected moments equal the gradient and its square.
        kept = before[name] * (1 - 1e-2 * 0.1 * (name in decayed))
        expected = kept - 1e-2 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)


def test_a_decay_that_nothing_could_hold_is_refused():
    rule = "[{name: deep, parameters: [ffn], layers: 0-3, depth_decay: 0.01, decay_with_lr: false}]"
    run = parse_command_line(["--config", "micro", "--lr_rules", rule]).run
    with refused("lr_rules.deep.depth_decay: 0.01 leaves 1e-06 of the rate 3 layers above the lowest"):
        GroupRates(run_groups(run, run.build_model_config(300)), run)


def test_a_rate_beyond_any_use_is_refused():
    rule = "[{name: deep, parameters: [ffn], layers: 0-199, depth_decay: 100}]"
    run = parse_command_line(
        ["--config", "micro", "--heads", "4x200", "--architecture.num_layers", "200", "--lr_rules", rule]
    ).run
    with refused("lr_rules.deep.depth_decay: 100 multiplies the rate by more than 100,000, 3 layers above"):
        GroupRates(run_groups(run, run.build_model_config(300)), run)
