"""Diagnostics of a run in progress: they leave no trace in its numbers, and equal what its checkpoints
say."""

import json
import math
from dataclasses import replace

import pytest
import torch

from model.errors import UserError
from model.initialization import initial_value
from model.parameters import parameter_roles
from model.transformer import Transformer
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.config.run_config import RunConfig
from pretrain.diagnostics.in_loop import find_slowing_rule
from pretrain.diagnostics.weights import displacement, kept_path, update_norm
from pretrain.optim.groups import GroupRates, run_groups
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import Shape, build, contents
from tests.helpers.training import curve, interrupted, nano_run, session

RULE = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "hold": 3}
K_RULE = {"name": "k", "parameters": ["k"], "scale": 0.5, "hold": 0.1}


def measured_run(small_folder, folder, name, every, flags="", rules=(RULE,)):
    saved = "" if "--checkpoint.every" in flags else "--checkpoint.every 2"
    flags = f"--name {name} --steps 8 --diagnostics_every {every} --diagnostics.sequences 5 {saved} {flags}"
    more = ("--checkpoint.keep_last", "9", "--lr_rules", json.dumps(rules))
    return nano_run(small_folder, folder, *flags.split(), *more)


def split(rows):
    """Rows without diagnostics, and the diagnostics of the rows that have some."""
    plain = [{k: v for k, v in row.items() if not k.startswith("diagnostics/")} for row in rows]
    measured = {row["step"]: {k: v for k, v in row.items() if k.startswith("diagnostics/")} for row in rows}
    return plain, {step: row for step, row in measured.items() if row}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "tensor_parallel"),
    [(2, 3, "fp32", 1), (2, 2, "bf16", 2)],
)
def test_training_numbers_are_the_same_bits(small_folder, tmp_path, ranks, stage, precision, tensor_parallel):
    rows = {}
    for every in (0, 2):
        flags = f"--precision {precision} --tensor_parallel {tensor_parallel}"
        run = measured_run(small_folder, tmp_path, f"every{every}", every, flags)
        assert run_distributed(session, ranks, run, stage, timeout=120)[0] == ([], None)
        rows[every] = curve(run.folder)
    (plain, none), (same, measured) = split(rows[0]), split(rows[2])
    assert plain == same and none == {} and list(measured) == [2, 4, 6, 8]
    assert "grad_norm" in plain[0] and "val_loss" in plain[3]
    for suffix in ("attention_distance/layer_3", "path_energy/layer_3", "lambda_q_initial/layer_0"):
        assert all(row[f"diagnostics/{suffix}"] > 0 for row in measured.values())
    for suffix in ("feature_drift/layer_1", "lambda_k_release/layer_3"):  # the rule holds for 3 steps
        assert f"diagnostics/{suffix}" in measured[4] and f"diagnostics/{suffix}" not in measured[2]
    if precision == "fp32":
        weights = {step: contents(run.folder / "checkpoints" / f"step_{step:06d}") for step in (2, 8)}
        check_weights(run, measured, weights)


def check_weights(run, measured, weights):
    """Displacements and update sizes against the checkpoints of the same steps, in float64."""
    config = run.build_model_config(600)
    with torch.device("meta"):
        roles = parameter_roles(Transformer(config))
    for step, tensors in weights.items():
        row = measured[step]
        for part in "qk":
            for layer in range(4):
                name = f"layers.{layer}.attention.{part}.weight"
                weight = tensors[name]["fp32"].double()
                start = initial_value(name, roles[name], weight.shape, config, run.seed).double()
                expected = ((weight - start).square().sum() / start.square().sum()).sqrt().item()
                found = row[f"diagnostics/lambda_{part}_initial/layer_{layer}"]
                assert found == pytest.approx(expected, rel=1e-6)
        checkpoint = UnshardedCheckpoint.open(run.folder / "checkpoints" / f"step_{step:06d}")
        for name, group in checkpoint.groups.items():
            lr, (b1, b2), eps = (group.settings[key] for key in ("lr", "betas", "eps"))
            moved = whole = count = 0.0
            for parameter in group.parameters:
                first, second = (tensors[parameter][key].double() for key in ("exp_avg", "exp_avg_sq"))
                update = lr * (first / (1 - b1**step)) / ((second / (1 - b2**step)).sqrt() + eps)
                moved += update.square().sum().item()
                whole += tensors[parameter]["fp32"].double().square().sum().item()
                count += update.numel()
            for figure, square in (("effective_lr", moved / count), ("relative_update", moved / whole)):
                assert row[f"diagnostics/{figure}/{name}"] == pytest.approx(math.sqrt(square), rel=1e-5)


def test_release_reference_is_the_weight_at_that_step(small_folder, tmp_path):
    run = measured_run(small_folder, tmp_path, "kept", 4, "--checkpoint.every 1")
    run_distributed(session, 2, run, 3, timeout=120)
    from safetensors.torch import load_file

    kept = load_file(kept_path(run.folder, 3))
    at_release = contents(run.folder / "checkpoints" / "step_000003")
    assert len(kept) == 8 and all(torch.equal(kept[name], at_release[name]["fp32"]) for name in kept)
    end = contents(run.folder / "checkpoints" / "step_000008")
    row = split(curve(run.folder))[1][8]
    for name in kept:
        _, layer, _, part, _ = name.split(".")
        expected = displacement(end[name]["fp32"], kept[name])
        assert row[f"diagnostics/lambda_{part}_release/layer_{layer}"] == pytest.approx(expected, rel=1e-6)


def test_a_control_keeps_the_weights_of_the_step_it_is_told(small_folder, tmp_path):
    flags = "--diagnostics.release 0.5 --validation.every 0"
    run = measured_run(small_folder, tmp_path, "control", 8, flags, rules=())
    run_distributed(session, 1, run, timeout=120)
    assert kept_path(run.folder, 4).is_file()
    assert "diagnostics/lambda_q_release/layer_0" in split(curve(run.folder))[1][8]


@pytest.mark.parametrize(
    ("first", "second"),
    [(Shape(1, 2), Shape(1, 2)), pytest.param(Shape(2, 3), Shape(1, 1), marks=pytest.mark.slow)],
    ids=str,
)
def test_after_a_resume_the_figures_go_on(small_folder, tmp_path, first, second):
    """Drift, and displacement from the release, need what an earlier session saw: the checkpoint has it."""
    flags, names = "--checkpoint.every 5", ("whole", "broken")
    whole, broken = (measured_run(small_folder, tmp_path, name, 2, flags) for name in names)
    run_distributed(session, second.ranks, whole, second.stage, timeout=120)
    run_distributed(interrupted, first.ranks, broken, 7, first.ranks, first.stage, timeout=120)
    assert run_distributed(session, second.ranks, broken, second.stage, timeout=120)[0][1] is None
    expected, found = split(curve(whole.folder))[1], split(curve(broken.folder))[1]
    assert list(found) == [2, 4, 6, 8]
    for step in (6, 8):
        assert found[step].keys() == expected[step].keys()
        if first == second:
            assert found[step] == expected[step]
        for key in ("feature_drift/layer_1", "lambda_q_release/layer_3", "attention_distance/layer_0"):
            key = f"diagnostics/{key}"
            assert found[step][key] == pytest.approx(expected[step][key], rel=1e-3)


def test_weights_made_elsewhere_have_no_displacement_from_a_seed(small_folder, tmp_path):
    from pretrain.checkpoint.state import DataIdentity, TrainingState
    from pretrain.checkpoint.weights_only import write_weights

    run = measured_run(small_folder, tmp_path, "origin", 0)
    run_distributed(session, 1, run, timeout=120)
    source = UnshardedCheckpoint.open(run.folder / "checkpoints" / "step_000008")
    state = TrainingState(model=source.state.model, data=DataIdentity(source.state.data.tokenizer))
    imported = replace(run, name="imported", diagnostics_every=4)
    weights = ((name, source.parameter(name)) for name in source.names())
    target = imported.folder / "checkpoints" / "step_000000"
    write_weights(target, state, weights, source.folder / "tokenizer")
    assert run_distributed(session, 1, imported, timeout=120)[0][1] is None
    row = split(curve(imported.folder))[1][4]
    assert not any("initial" in key for key in row) and "diagnostics/lambda_q_release/layer_0" in row


def test_without_a_held_out_window(small_folder, small, tmp_path):
    """A context longer than the validation split: a run without validation trains all the same, and says
    so."""
    tokens = str(small.validation.num_tokens)
    long = f"--architecture.context_length {tokens} --global_batch_tokens {tokens} --micro_batch 1"
    run = measured_run(small_folder, tmp_path, "long", 2, f"{long} --validation.every 0")
    (note,) = run_distributed(notes_of, 1, run, timeout=120)[0]
    assert note.startswith("no diagnostics: data: small/validation has")
    ripe = replace(run, lr_rules=[RULE | {"release": "maturity", "hold": 0}])
    assert "fewer than one window" in run_distributed(notes_of, 1, ripe, timeout=120)[0]


def notes_of(run):
    """What a trainer has to say before it trains, or the line that ends it."""
    try:
        return [line.removeprefix("note     ") for line in build(run, Shape(1, 2)).announce()]
    except UserError as error:
        return str(error)


def test_update_by_hand():
    group = {"betas": (0.5, 0.75), "eps": 0.0, "lr": 0.1}
    # After two updates: m̂ = 3 / (1 − 0.25) = 4, v̂ = 7 / (1 − 0.5625) = 16; 0.1 · 4 / 4, twice.
    found = update_norm(torch.tensor([3.0, -3.0]), torch.tensor([7.0, 7.0]), 2, group)
    assert found == pytest.approx(0.1 * math.sqrt(2))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], None),
        (["upper_qk"], "upper_qk"),
        ([{"name": "n", "parameters": ["norm"], "scale": 2, "hold": 0.5}, "upper_qk"], "upper_qk"),
        (["upper_qk_maturity", K_RULE], "upper_qk_maturity"),
        ([{"name": "forever", "parameters": ["q"], "scale": 0.5}], None),
    ],
)
def test_the_release_is_that_of_the_rule_which_slows_q_and_k(rules, expected):
    run = RunConfig(model="uniform-tiny", lr_rules=rules, steps=1000)
    assert find_slowing_rule(GroupRates(run_groups(run, run.build_model_config()), run)) == expected
