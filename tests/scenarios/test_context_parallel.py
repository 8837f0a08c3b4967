"""Training with --context_parallel: the same numbers as c = 1 at every stage, and what is refused."""

from __future__ import annotations

import pytest
import torch

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.engine.build import build_network, deepspeed_mpu
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.engine.patches import accept_optimizer, prepare_deepspeed
from pretrain.plan.micro_batch import plan_batch
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import ROOT, broken_off, check_refused, curve, interrupted, nano_run, session

STEPS = 2


def train_with_sgd(stage, context_parallel=1, tensor_parallel=1, copies=1):
    """Plain SGD on ragged targets: losses, gradient norms and this rank's weights in full, by name.

    Adam would hide a gradient of the wrong size.
    """
    import deepspeed

    prepare_deepspeed()
    world = start_world(None, False, tensor_parallel, context_parallel=context_parallel)
    given = [
        "--model",
        "prism-nano",
        "--precision",
        "fp32",
        "--compile",
        "false",
        "--architecture.z_loss",
        "0.01",
    ]
    given += ["--context_parallel", str(context_parallel), "--tensor_parallel", str(tensor_parallel)]
    run = parse_command_line([*given, "--architecture.context_length", "16"]).run
    config = run.build_model_config(300)
    plan = plan_batch(64, 2, config, world.data_parallel, 1 << 30, "cpu", tensor_parallel)
    ds_config = read_ds_config(str(ROOT / f"ds_configs/zero{stage}.json"))
    merged = merge_ds_config(ds_config, run, plan, False, config)
    merged |= {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    network = build_network(run, config, merged, world.grid)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    accept_optimizer(torch.optim.SGD)
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=optimizer,
        config=merged,
        dist_init_required=False,
        mpu=deepspeed_mpu(world.grid),
    )
    data = torch.randint(0, 300, (STEPS, plan.sequences, 17), generator=torch.Generator().manual_seed(5))
    labels = data[:, :, 1:].clone()
    labels[:, :, ::3] = -100
    labels[0, :, 12:] = -100  # the first of two context ranks has a third of the others' targets
    labels[1, 0, :] = -100
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(plan.accumulation):
            first = (micro * world.data_parallel + world.data_rank) * plan.micro_batch
            rows = slice(first, first + plan.micro_batch)
            loss = engine(data[step, rows, :-1].contiguous(), labels[step, rows].contiguous())
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / plan.accumulation
        losses.append(world.sum(total).item() / world.data_parallel)
        norms.append(float(engine.get_global_grad_norm()))
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=str(stage).startswith("3")):
            sharded = bool(getattr(parameter, "tensor_model_parallel", False))
            weights[name] = (sharded, parameter.detach().clone().double())
    return losses, norms, weights


@pytest.fixture(scope="module")
def reference():
    return run_distributed(train_with_sgd, 1, 2, timeout=120)[0]


GRIDS = [
    (1, 2, 1, 4),
    *slow([(2, 2, 1, 4), (3, 2, 1, 4), ("2_offload", 2, 1, 4), (1, 4, 1, 4), (2, 2, 2, 4), (3, 2, 2, 4)]),
]


@pytest.mark.parametrize(("stage", "context_parallel", "tensor_parallel", "ranks"), GRIDS)
def test_sgd_moves_every_weight_as_one_process_does(
    reference, stage, context_parallel, tensor_parallel, ranks
):
    losses, norms, weights = reference
    found = run_distributed(train_with_sgd, ranks, stage, context_parallel, tensor_parallel, timeout=200)
    for one_losses, one_norms, one_weights in found:
        assert one_losses == pytest.approx(losses, rel=1e-6)
        assert one_norms == pytest.approx(norms, rel=1e-5)
        for name, (sharded, weight) in one_weights.items():
            if not sharded:
                assert weight == pytest.approx(weights[name][1], abs=2e-6), name


def flat(value):
    """Numbers of nested lists, by layer and head."""
    return [number for item in value for number in flat(item)] if isinstance(value, list) else [value]


MUON = "--optimizer.kind muon"
SESSIONS = [
    ("c2", 2, 2, "--context_parallel 2"),
    *slow(
        [
            ("c4", 4, 1, "--context_parallel 4"),
            ("t2c2", 4, 3, "--context_parallel 2 --tensor_parallel 2 --sequence_parallel true"),
            ("d2c2", 4, 1, "--context_parallel 2 --document_mask true"),
            ("muon", 4, 2, f"--context_parallel 2 {MUON}"),
            ("compiled", 2, 2, "--context_parallel 2 --compile true --fused all"),
            ("checkpointing", 2, 3, "--context_parallel 2 --activation_checkpointing true --fused none"),
        ]
    ),
]
OWN = (
    "--context_parallel",
    "--tensor_parallel",
    "--sequence_parallel",
    "--activation_checkpointing",
    "--compile",
    "--fused",
)


@pytest.mark.parametrize(("name", "ranks", "stage", "arguments"), SESSIONS)
def test_a_whole_session_gives_the_curve_of_one_rank(small_folder, tmp_path, name, ranks, stage, arguments):
    """Batches, validation, diagnostics and logged means, tokens and learning rates are those of c = 1."""
    words = arguments.split()
    pairs = [words[index : index + 2] for index in range(0, len(words), 2)]
    same = [word for pair in pairs if pair[0] not in OWN for word in pair]
    rows = {}
    for each, world, given in (("alone", 1, same), (name, ranks, words)):
        run = nano_run(small_folder, tmp_path, f"--steps 4 --diagnostics_every 2 --name {each}", *given)
        assert run_distributed(session, world, run, stage, timeout=200) == [([], None)] * world
        rows[each] = curve(run.folder)
    for one, other in zip(rows["alone"], rows[name], strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert flat(other[key]) == pytest.approx(flat(value), rel=1e-5, abs=1e-7), key
    assert "val_loss" in rows[name][-1]


@pytest.mark.slow
def test_a_run_goes_on_at_other_degrees(small_folder, tmp_path):
    """From c = 1 to 2, to t = 2 x c = 2, and back: the curve of one session."""
    quick = "--diagnostics_every 0 --validation.every 0 --steps 8 --checkpoint.every 2"
    whole = nano_run(small_folder, tmp_path, quick, "--name whole")
    assert run_distributed(session, 1, whole, 2, timeout=100) == [([], None)]
    parts = [
        (1, nano_run(small_folder, tmp_path, quick, "--context_parallel 1")),
        (2, nano_run(small_folder, tmp_path, quick, "--context_parallel 2")),
        (4, nano_run(small_folder, tmp_path, quick, "--context_parallel 2 --tensor_parallel 2")),
    ]
    for steps, stage, (ranks, run) in zip((2, 4, 6), (2, 3, 1), parts, strict=True):
        assert "stopped" in run_distributed(interrupted, ranks, run, steps, ranks, stage, timeout=100)
    notes, problem = run_distributed(session, 2, parts[1][1], 2, timeout=100)[0]
    assert problem is None and "tensor_parallel 2 -> 1" in notes[0]
    for one, other in zip(curve(whole.folder), curve(parts[0][1].folder), strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_cut_off_five_times_is_bit_identical(small_folder, tmp_path):
    """Ranks that are killed, twenty times and more, are those of test_chaos.py (CHAOS_FLAGS)."""
    quick = "--steps 12 --checkpoint.every 3 --validation.every 10 --diagnostics_every 6"
    run = nano_run(small_folder, tmp_path, "--context_parallel 2", quick)
    broken_off(run, *range(3, 13, 2), ranks=2, stage=3)


REFUSED = [
    (2, "--context_parallel 4", "4 does not divide the 2 ranks of this run; valid values are 1, 2"),
    (
        4,
        "--context_parallel 4 --tensor_parallel 2",
        "4 does not divide the 4 ranks of this run, 2 of them tensor-parallel; valid values are 1, 2",
    ),
    (
        2,
        "--context_parallel 2 --architecture.context_length 62 --global_batch_tokens 496",
        "context_length 62 is not a multiple of 4, which 2 ranks need for chunks of equal length; nearest "
        "valid context_length: 60 or 64; nearest valid context_parallel: 1",
    ),
]


@pytest.mark.parametrize(("world", "arguments", "message"), REFUSED)
def test_bad_input_is_refused_on_every_rank(small_folder, tmp_path, world, arguments, message):
    check_refused(nano_run(small_folder, tmp_path, arguments), world, message)


def test_classifiers_are_refused():
    with pytest.raises(UserError, match="context_parallel: 2 does not go with --task classification"):
        parse_command_line(["--config", "classification", "--context_parallel", "2"])


FIFTY = "--steps 50 --validation.every 10 --checkpoint.every 0 --diagnostics_every 0"


def losses_of(folder):
    rows = curve(folder)
    return [row[key] for row in rows for key in ("train_loss", "val_loss") if key in row]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage", "kind"), [(2, 3, "muon"), (4, 2, "adamw")])
def test_fifty_steps_stay_within_a_millionth(small_folder, tmp_path, ranks, stage, kind):
    given = [FIFTY, "--optimizer.kind", kind]
    alone = nano_run(small_folder, tmp_path, *given, "--name", "alone")
    assert run_distributed(session, 1, alone, 2, timeout=200) == [([], None)]
    run = nano_run(small_folder, tmp_path, *given, "--context_parallel", str(ranks))
    assert run_distributed(session, ranks, run, stage, timeout=300) == [([], None)] * ranks
    expected, found = losses_of(alone.folder), losses_of(run.folder)
    assert len(found) == len(expected) == 55
    differences = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
    print(f"c = {ranks}, stage {stage}, {kind}: largest difference {max(differences):.1e}")
    assert max(differences) <= 1e-6


@pytest.mark.slow
def test_a_trained_model_goes_on_with_longer_sequences(small_folder, tmp_path):
    quick = "--validation.every 0 --diagnostics_every 0 --steps 2"
    short = nano_run(small_folder, tmp_path, quick)
    assert run_distributed(session, 1, short) == [([], None)]
    rows = []
    for c in (1, 2):
        changes = f"--architecture.context_length 128 --architecture.rope_base 5e5 --context_parallel {c}"
        long = nano_run(small_folder, tmp_path, f"{quick} --init_from {short.folder} --name c{c} {changes}")
        assert all(problem is None for _, problem in run_distributed(session, c, long))
        rows.append([row["train_loss"] for row in curve(long.folder)])
    assert rows[1] == pytest.approx(rows[0], rel=1e-6)
    assert rows[0][0] < curve(short.folder)[0]["train_loss"]  # it began with trained weights
