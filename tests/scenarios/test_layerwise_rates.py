"""What learning rate every parameter is really trained with: under every stage, grid, resume and change of
shape."""

import dataclasses
import json
from unittest import mock

import pytest
import torch

from model.initialization import initial_value
from model.parameters import parameter_roles, parameter_specs
from model.transformer import Transformer
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.shapes import Shape, build, contents, differences, fit, load_and_gather, newest
from tests.helpers.training import curve, nano_run, session

# Four layers; 2 and 3 are the upper half.
SLOW = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "hold": 8, "ramp": 4}
FAST = {"name": "fast", "parameters": ["norm", "embedding"], "scale": 2, "hold": 0.5}
PEAK = 1e-3
# 100 steps: warmup over 4, constant, then linearly to a tenth over the last 20.
BASE = [0.25, 0.5, 0.75, 1.0] + [1.0] * 76 + [1 - 0.9 * i / 20 for i in range(1, 21)]
SLOW_FACTOR = [0.25] * 8 + [0.4375, 0.625, 0.8125, 1.0] + [1.0] * 88
FAST_FACTOR = [2.0] * 50 + [1.0] * 50


def hand_computed(name, step):
    """The learning rate of a parameter of a gpt2-nano model at a 0-based step, from the table above."""
    upper_qk = {f"layers.{layer}.attention.{part}.weight" for layer in (2, 3) for part in "qk"}
    factor = 1.0
    if name in upper_qk:
        factor = SLOW_FACTOR[step]
    elif "norm" in name or "embedding" in name:
        factor = FAST_FACTOR[step]
    return PEAK * BASE[step] * factor


def rates_run(small_folder, folder, *more, rules=(SLOW, FAST)):
    """AdamW without memory (betas 0) and with a vanishing eps moves every weight that has a gradient by
    exactly its learning rate: the rate can be read off the weights."""
    settings = (
        "--model gpt2-nano --steps 100 --global_batch_tokens 256 --micro_batch 2",
        "--schedule.kind wsd --schedule.warmup 4 --schedule.decay 20 --schedule.minimum 0.1",
        f"--optimizer.learning_rate {PEAK} --optimizer.betas [0,0] --optimizer.eps 1e-20",
        "--optimizer.weight_decay 0 --validation.every 0 --checkpoint.every 10 --logging.every 50",
    )
    return nano_run(small_folder, folder, *settings, "--lr_rules", json.dumps(list(rules)), *more)


def masters(engine):
    """Copies of this rank's fp32 weights by parameter, and the learning rate that Adam has for each."""
    from pretrain.engine.layout import engine_flats

    weights, rates = {}, {}
    for flat in engine_flats(engine):
        for name, pieces in flat.pieces.items():
            rates[name] = flat.group["lr"]
            for piece in pieces:
                part = flat.master.data[piece.offset : piece.offset + piece.numel].clone()
                weights.setdefault(name, []).append(part)
    return weights, rates


def observed_session(run, shape, stop=None):
    """Train; step -> parameter -> (learning rate in its group, how far its weights moved at most)."""
    from pretrain.trainer import Trainer

    original, seen = Trainer._forward_backward, {}

    def observe(self, batches):
        if self.state.step == stop:
            raise KeyboardInterrupt
        before, rates = masters(self.engine)
        loss = original(self, batches)
        after, _ = masters(self.engine)
        pairs = {name: zip(after[name], before[name], strict=True) for name in before}
        moved = {name: max((a - b).abs().max().item() for a, b in pairs[name]) for name in before}
        seen[self.state.step] = {name: (rate, moved.get(name)) for name, rate in rates.items()}
        return loss

    with mock.patch.object(Trainer, "_forward_backward", observe):
        try:
            fit(build(run, shape))
        except KeyboardInterrupt:
            assert stop is not None
    return seen


def check(results, steps):
    """Every rank's observations of *steps* against the table."""
    for seen in results:
        assert list(seen) == list(steps)
        for step, parameters in seen.items():
            assert len(parameters) == 4 * 16 + 4
            for name, (rate, _) in parameters.items():
                assert rate == pytest.approx(hand_computed(name, step), rel=1e-12), (name, step)
    for step in steps:
        for name in results[0][step]:
            moved = max(seen[step][name][1] or 0.0 for seen in results)
            # fp32 weights of about 1: their difference is known to 1e-7
            assert moved == pytest.approx(hand_computed(name, step), rel=1e-3, abs=2e-7), (name, step)


SHAPES = [Shape(2, 2), *slow([Shape(1, 1), Shape(2, 3, tensor_parallel=2)])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_parameter_at_every_step(small_folder, tmp_path, shape):
    run = rates_run(small_folder, tmp_path, f"--tensor_parallel {shape.tensor_parallel}")
    results = run_distributed(observed_session, shape.ranks, run, shape, timeout=240)
    check(results, range(100))
    rows = curve(run.folder)
    expected = [PEAK * base * factor for base, factor in zip(BASE, SLOW_FACTOR, strict=True)]
    assert [row["lr/slow/decay"] for row in rows] == pytest.approx(expected, rel=1e-12)
    groups = {key for key in rows[0] if key.startswith("lr/")}
    assert groups == {"lr/base/decay", "lr/base/no_decay", "lr/slow/decay", "lr/fast/no_decay"}


@pytest.mark.slow
def test_after_resume_and_changes_of_shape(small_folder, tmp_path):
    """Stopped inside the ramp, after it, and after the other rule's hold; each time on with another shape."""
    run = rates_run(small_folder, tmp_path, "--checkpoint.every 5")
    legs = [
        (Shape(1, 1), 10),
        (Shape(1, 1), 20),  # the same shape: DeepSpeed's own loading
        (Shape(2, 3), 55),
        (Shape(2, 3, tensor_parallel=2), 70),
        (Shape(1, 2), None),
    ]
    begin = 0
    for shape, stop in legs:
        here = dataclasses.replace(run, tensor_parallel=shape.tensor_parallel)
        results = run_distributed(observed_session, shape.ranks, here, shape, stop, timeout=240)
        check(results, range(begin, stop or 100))
        begin = stop


def stays_and_moves(run):
    """Which parameters of a finished run's checkpoint are still the bits of their initialization."""
    config = run.build_model_config(600)
    specs = parameter_specs(config)
    with torch.device("meta"):
        roles = parameter_roles(Transformer(config))
    found = contents(newest(run.folder))
    # Masters begin as copies of the weights.
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    begun = {n: initial_value(n, roles[n], spec.shape, config, run.seed) for n, spec in specs.items()}
    return {name for name in specs if torch.equal(found[name]["fp32"], begun[name].to(dtype).float())}


@pytest.mark.parametrize("shape", [Shape(2, 1, "bf16"), *slow([Shape(2, 3, tensor_parallel=2)])], ids=str)
def test_frozen_weights_keep_their_bits_and_all_others_move(small_folder, tmp_path, shape):
    """Zero scale and, at a learning rate of zero, no decay."""
    freeze = {"name": "still", "parameters": ["q", "k"], "layers": "upper_half", "freeze": True}
    settings = "--model gpt2-nano --steps 4 --validation.every 0 --optimizer.weight_decay 0.5"
    shaped = f"--precision {shape.precision} --tensor_parallel {shape.tensor_parallel}"
    run = nano_run(small_folder, tmp_path, settings, shaped, "--lr_rules", json.dumps([freeze]))
    stage = shape.stage
    assert run_distributed(session, shape.ranks, run, stage, timeout=120) == [([], None)] * shape.ranks
    frozen = {f"layers.{layer}.attention.{part}.weight" for layer in (2, 3) for part in "qk"}
    assert stays_and_moves(run) == frozen


@pytest.mark.parametrize("shape", [Shape(2, 1, "bf16"), Shape(2, 3)], ids=str)
@pytest.mark.slow
def test_other_rules_regroup_what_was_saved(small_folder, tmp_path, shape):
    """Rules may change on resume: weights and moments are sorted into the new groups, to the bit, and it is
    noted."""
    settings = f"--model gpt2-nano --steps 3 --precision {shape.precision} --validation.every 0"
    run = nano_run(small_folder, tmp_path, settings)
    run_distributed(session, shape.ranks, run, shape.stage, timeout=120)
    rule = {key: SLOW[key] for key in ("name", "parameters", "layers", "scale")} | {"decay_with_lr": False}
    ruled = dataclasses.replace(run, lr_rules=[rule])
    # Loaded and saved again without a step: a run that has all its steps only loads.
    found = run_distributed(load_and_gather, shape.ranks, ruled, shape, tmp_path / "again", timeout=120)[0]
    assert any(note.startswith("lr_rules changed: [] -> ") for note in found["notes"])
    assert list(found["groups"]) == ["base/decay", "base/no_decay", "slow/decay"] and found["steps"] == {3}
    assert differences(contents(newest(tmp_path / "again")), contents(newest(run.folder))) == []
    # And it goes on with the new rates. (Other numbers of the rule alone need no regrouping.)
    notes, error = run_distributed(session, shape.ranks, ruled, shape.stage, timeout=120, steps=5)[0]
    assert error is None and "steps changed: 3 -> 5" in notes
    stronger = dataclasses.replace(run.optimizer, weight_decay=0.3)
    faster = dataclasses.replace(ruled, lr_rules=[rule | {"scale": 0.5}], optimizer=stronger)
    notes, error = run_distributed(session, shape.ranks, faster, shape.stage, timeout=120, steps=6)[0]
    assert error is None and not any("groups" in note for note in notes)
    last = curve(run.folder)
    assert last[4]["lr/slow/decay"] == last[4]["lr/base/decay"] / 4
    assert last[5]["lr/slow/decay"] == last[5]["lr/base/decay"] / 2
    groups = UnshardedCheckpoint.open(newest(run.folder)).groups
    decays = {name: group.settings["weight_decay"] for name, group in groups.items()}
    assert decays == {"base/decay": 0.3, "base/no_decay": 0.0, "slow/decay": 0.6}
