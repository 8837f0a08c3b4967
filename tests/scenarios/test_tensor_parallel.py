"""Training with --tensor_parallel: the same numbers as t = 1 at every stage, and what is refused."""

from __future__ import annotations

import pytest
import torch

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.engine.patches import prepare_deepspeed
from pretrain.plan.micro_batch import plan_batch
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import ROOT, broken_off, check_refused, curve, engine_of, nano_run, session

STEPS = 20
# Clipping and decay so strong that a wrong norm, or a shard that is not decayed, shows in the first digits.
SETTINGS = ["--optimizer.gradient_clipping", "0.05", "--optimizer.weight_decay", "10"]
ARCHITECTURE = [
    "--architecture",
    "{context_length: 16, attention_bias: all, ffn_bias: true, ffn_width: [128, 0, 96, 64], "
    "attention_gate: head, block_width: [48, 72, 40, 48]}",
]


def train(tensor_parallel, stage, precision="fp32", sequence_parallel=False, compiled=False):
    """Train on random tokens; losses, norms, and this rank's parameters in full, in the model's order."""
    import deepspeed

    prepare_deepspeed()
    world = start_world(None, False, tensor_parallel, sequence_parallel)
    given = ["--model", "prism-nano", "--precision", precision, "--compile", str(compiled)]
    run = parse_command_line([*given, *SETTINGS, *ARCHITECTURE]).run
    config = run.build_model_config(300)
    plan = plan_batch(64, 2, config, world.data_parallel, 1 << 30, "cpu", tensor_parallel)
    ds_config = read_ds_config(str(ROOT / f"ds_configs/zero{stage}.json"))
    merged = merge_ds_config(ds_config, run, plan, precision == "bf16", config)
    engine = engine_of(run, config, merged, world.grid)
    data = torch.randint(0, 300, (4, plan.sequences, 17), generator=torch.Generator().manual_seed(5))
    losses, norms = [], []
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = 3e-4
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(plan.accumulation):
            first = (micro * world.data_parallel + world.data_rank) * plan.micro_batch
            rows = data[step % 4, first : first + plan.micro_batch]
            loss = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / plan.accumulation
        losses.append(world.sum(total).item() / world.data_parallel)
        norms.append(float(engine.get_global_grad_norm()))
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            sharded = bool(getattr(parameter, "tensor_model_parallel", False))
            weights[name] = (sharded, parameter.detach().clone().float())
    return losses, norms, weights


@pytest.fixture(scope="module")
def reference():
    return run_distributed(train, 1, 1, 2, timeout=120)[0]


# The tensor-parallel degree, ranks, the stage, and whether norms are sequence-parallel.
WORLDS = [(2, 2, 1, False), *slow([(2, 2, 3, True), (2, 4, 2, True), (4, 4, 3, False)])]


@pytest.mark.parametrize(("tensor_parallel", "world", "stage", "sequence_parallel"), WORLDS)
def test_same_training_as_one_rank(reference, tensor_parallel, world, stage, sequence_parallel):
    """Loss, gradient norm, clipping and decay; replicated parameters stay bit-identical on all ranks."""
    losses, norms, weights = reference
    assert losses[-1] < losses[3] - 0.005 and min(norms) > 0.05  # every step was clipped
    results = run_distributed(train, world, tensor_parallel, stage, "fp32", sequence_parallel, timeout=120)
    for found_losses, found_norms, _ in results:
        assert found_losses == pytest.approx(losses, rel=1e-6)  # the design's bound in fp32
        assert found_norms == pytest.approx(norms, rel=1e-6)
    for name, (sharded, _) in results[0][2].items():
        parts = [result[2][name][1] for result in results]
        if sharded:
            assert parts[0].numel() * tensor_parallel == weights[name][1].numel(), name
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name


@pytest.mark.slow
def test_a_whole_session_gives_the_curve_of_one_rank(small_folder, tmp_path):
    """Batches, validation windows and logged means go by data-parallel rank: here 2 copies of 2 ranks."""
    rows = {}
    for name, world, tensor_parallel in (("alone", 1, 1), ("grid", 4, 2)):
        run = nano_run(small_folder, tmp_path, f"--steps 4 --name {name} --tensor_parallel {tensor_parallel}")
        assert run_distributed(session, world, run, 2, timeout=120) == [([], None)] * world
        rows[name] = curve(run.folder)
    for one, other in zip(rows["alone"], rows["grid"], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == pytest.approx(value, rel=1e-6), key
    assert "val_loss" in rows["grid"][-1]


@pytest.fixture(scope="module")
def bf16_reference():
    return run_distributed(train, 1, 1, 2, "bf16", timeout=120)[0]


@pytest.mark.parametrize(("tensor_parallel", "stage"), [(2, 2), (4, 3)])
@pytest.mark.slow
def test_bf16_curves_agree(bf16_reference, tensor_parallel, stage):
    """In bf16 every sum is rounded to 8 bits, in another order for each t: 1e-3 on the loss (the design's
    bound), and 1e-2 on the norm, in which Adam has made 20 steps' weights of the differences."""
    losses, norms, _ = bf16_reference
    results = run_distributed(train, tensor_parallel, tensor_parallel, stage, "bf16", timeout=120)
    for found, found_norms, weights in results:
        assert found == pytest.approx(losses, rel=1e-3)
        assert found_norms == pytest.approx(norms, rel=1e-2)
        for name, (sharded, weight) in weights.items():
            assert sharded or torch.equal(weight, results[0][2][name][1]), name


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--tensor_parallel 2 --steps 8 --validation.every 0")
    broken_off(run, 6, ranks=2, stage=3)


ODD = "--tensor_parallel 2 --architecture.context_length 63 --global_batch_tokens 504 --micro_batch 1"
REFUSED = [
    (2, "--tensor_parallel 4", "4 does not divide the 2 ranks of this run; valid values are 1, 2"),
    (
        4,
        "--tensor_parallel 4 --architecture.ffn_width 126",
        "4 does not divide ffn_width 126; nearest valid: 2",
    ),
    (2, ODD, "micro_batch must be a multiple of 2 (nearest: 2), or context_length one of 4"),
]


@pytest.mark.parametrize(("world", "arguments", "message"), REFUSED)
def test_bad_input_is_refused_on_every_rank(small_folder, tmp_path, world, arguments, message):
    check_refused(nano_run(small_folder, tmp_path, arguments), world, message)


def test_the_chosen_micro_batch_can_be_split():
    run = parse_command_line(["--architecture.context_length", "63", "--model", "prism-nano"]).run
    model = run.build_model_config(300)
    # Heads 2, 3, 4, 4 on 4 ranks: 63 positions cannot be split, so micro-batches are multiples of 4.
    assert plan_batch(63 * 24, None, model, 1, 1 << 30, "cpu", 4).micro_batch % 4 == 0
    with pytest.raises(UserError, match=r"global_batch_tokens: 6 sequences .* give a multiple of 252$"):
        plan_batch(63 * 6, None, model, 1, 1 << 30, "cpu", 4)


@pytest.mark.slow
def test_compiled_blocks_train_alike(reference):
    """Fusing changes rounding: the design's bound. Both forms of the exchange are compiled (B = 2; r = 2 and
    4)."""
    losses, norms, _ = reference
    for found, found_norms, _ in run_distributed(train, 4, 4, 2, compiled=True, timeout=400):
        assert found == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-6)
