"""Heads that grow and are pruned in real runs: nothing else changes, and a run that was cut off goes on the
same."""

import json
import math

import pytest
import torch

from model.config import ModelConfig
from model.transformer import Transformer
from pretrain import convert, generate
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.state import read_features, read_state
from pretrain.growth.edit import open_changed
from pretrain.growth.hook import Growth
from pretrain.growth.measure import Candidate, gradient_norms, second_moments
from pretrain.run.saved import SavedRun
from pretrain.runtime.signals import Stopped
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.refusals import refused
from tests.helpers.shapes import VOCABULARY_ROWS, Shape, build, gathered, joined, same_bits
from tests.helpers.training import broken_off, curve, interrupted, nano_run, session

# Every kind of parameter that has heads; 12 is a multiple of 2 and 3 tensor-parallel ranks.
BIASED = """--growth.head_dim 12 --growth.maximum 4 --global_batch_tokens 768 --micro_batch 6
    --architecture.attention_bias all --architecture.positions learned --architecture.norm layernorm
    --architecture.norm_bias true --architecture.ffn_width 96,48,0,96
    --architecture.block_width 48,60,36,72"""
GROWN = (1, 2, 1, 3)
# Every head of these small weights is below the threshold of pruning at first; λ_max is above that of growth
# later.
PRUNING = "--growth.start 3 --growth.grow_above 0.1 --growth.prune_below 0.0999"
INCRT = "--growth.criterion incrt --growth.interval 2 --growth.calibration 1"


def growing(data, runs, flags="", steps=6, schedule=None):
    """A run that saves at every event only."""
    quick = (
        f"--steps {steps} --validation.every 0 --checkpoint.every 0 --checkpoint.keep_last 9 {flags}".split()
    )
    if schedule:
        quick += ["--growth.criterion", "schedule", "--growth.schedule", json.dumps(schedule)]
    return nano_run(data, runs, *quick)


def loaded_after_the_event(run, shape):
    """What an engine holds that has read the newest checkpoint and made its pending changes."""
    opened = build(run, shape)
    held = gathered(opened.trainer.engine)
    return held if torch.distributed.get_rank() < shape.tensor_parallel else None


def heads_of(name, tensor, layer_heads, head_dim=12):
    """The parts of a tensor by head, or the whole where there are none."""
    part = name.split(".")[3] if ".attention." in name else ""
    if part == "head_gate":
        return tensor.split(1)[:layer_heads]
    if part in ("q", "k", "v", "gate"):
        return tensor.split(head_dim)[:layer_heads]
    if part == "o" and name.endswith("weight"):
        return tensor.split(head_dim, 1)[:layer_heads]
    return (tensor,)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 2),
        *slow([Shape(2, 3), Shape(3, 1, "bf16", tensor_parallel=3)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", ["head", *slow(["none", "element"])])
def test_all_other_heads_keep_weights_and_moments(small_folder, tmp_path, shape, gate):
    flags = f"--precision {shape.precision} --tensor_parallel {shape.tensor_parallel}"
    flags += f" --architecture.attention_gate {gate}"
    run = growing(small_folder, tmp_path, f"{flags} {BIASED}", schedule={2: "1,2,1,3"})
    run_distributed(interrupted, shape.ranks, run, 2, shape.ranks, shape.stage, timeout=120)
    before = UnshardedCheckpoint.open(run.folder / "checkpoints/step_000002")
    assert ModelConfig.from_json(before.state.model).heads == (1, 1, 1, 1)
    parts = run_distributed(loaded_after_the_event, shape.ranks, run, shape, timeout=120)
    held = joined(parts, VOCABULARY_ROWS)
    assert held["steps"] == {2}
    for name in before.names():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            old, new = before.tensor(name, key), held["parameters"][name][key]
            olds, news = heads_of(name, old, 1), heads_of(name, new, 1)
            assert all(same_bits(a, b.float()) for a, b in zip(olds, news, strict=True)), (name, key)
            if layer is not None and len(heads_of(name, new, 9)) > 1 - ("attention" not in name):
                added = heads_of(name, new, 9)[1:] if new.shape != old.shape else ()
                assert len(added) == (GROWN[layer] - 1 if new.shape != old.shape else 0)
                zero = key != "fp32" or name.endswith(("bias", "o.weight", "gate.weight"))
                assert all(bool(part.any()) != zero for part in added), (name, key)


def stopped_in_the_hook(run, step):
    """A session that is asked to stop in the middle of the check after *step* steps."""
    original = Growth.run

    def abandoned(self, engine, state, row):
        if state.step == step:
            raise Stopped("asked to stop", 75)
        return original(self, engine, state, row)

    Growth.run = abandoned
    try:
        session(run)
    except Stopped as stopped:
        return stopped.exit_code
    finally:
        Growth.run = original


def logits_of(checkpoint, tokens):
    config = ModelConfig.from_json(checkpoint.state.model)
    heads = tuple(
        checkpoint.shape(f"layers.{layer}.attention.q.weight")[0] // config.layer_head_dim(layer)
        for layer in range(config.num_layers)
    )
    network = Transformer(config.replace(heads=heads)).eval()
    network.load_state_dict({name: checkpoint.parameter(name) for name in checkpoint.names()})
    with torch.no_grad():
        return network(tokens)


def opened_with(folder, pending):
    """The checkpoint after these changes, in place of those that it was saved with."""
    state = json.loads((folder / "state.json").read_text())
    state["records"]["growth"]["values"]["pending"] = pending
    (folder / "state.json").write_text(json.dumps(state))
    return open_changed(folder)


def test_new_heads_change_no_function_and_pruned_ones_leave_the_others(small_folder, tmp_path):
    run = growing(small_folder, tmp_path, f"--growth.start 3 {BIASED}", schedule={2: "3,4,3,4"})
    run_distributed(interrupted, 1, run, 2, 1, 2)
    folder = run.folder / "checkpoints/step_000002"
    before, grown = UnshardedCheckpoint.open(folder), open_changed(folder)
    tokens = torch.randint(0, 600, (4, 64), generator=torch.Generator().manual_seed(1))
    logits = logits_of(before, tokens)
    # A product over more columns is summed in another order, so the last bit may differ.
    torch.testing.assert_close(logits_of(grown, tokens), logits, rtol=1e-6, atol=1e-6)
    # A head whose output is zero goes without a trace.
    head = {"layer": 3, "head": 3}
    pruned = opened_with(folder, [head | {"kind": "grow"}, head | {"kind": "prune"}])
    torch.testing.assert_close(logits_of(pruned, tokens), logits, rtol=1e-6, atol=1e-6)
    pruned = opened_with(folder, [{"layer": 1, "head": 1, "kind": "prune"}])
    parts = [(f"{part}.{kind}", 0) for part in "qkv" for kind in ("weight", "bias")] + [("o.weight", 1)]
    for part, dimension in parts:
        name = f"layers.1.attention.{part}"
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            kept = [before.tensor(name, key).split(12, dimension)[head] for head in (0, 2)]
            assert same_bits(pruned.tensor(name, key), torch.cat(kept, dimension))
    first = "layers.0.attention.q.weight"
    assert torch.equal(pruned.parameter(first), before.parameter(first))


def test_a_run_stopped_in_a_check_makes_its_event_before_the_next_step(small_folder, tmp_path):
    flags = f"{INCRT} --growth.maximum 3 --growth.until 7"
    whole, run = (growing(small_folder, tmp_path / name, flags, steps=8) for name in ("whole", "stopped"))
    assert run_distributed(session, 1, whole)[0] == ([], None)
    events = read_state(whole.folder / "checkpoints/step_000008").record("growth")["events"]
    step = events[0]["step"]
    assert run_distributed(stopped_in_the_hook, 1, run, step)[0] == 75
    assert read_state(run.folder / f"checkpoints/step_{step:06d}").pending == ["growth"]
    assert run_distributed(session, 1, run)[0][1] is None
    assert curve(run.folder) == curve(whole.folder)
    assert read_state(run.folder / "checkpoints/step_000008").record("growth")["events"] == events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "flags"),
    [
        (1, 2, f"--growth.criterion incrt {PRUNING}"),
        *slow(
            [
                (2, 3, f"--growth.criterion incrt --tensor_parallel 2 --precision bf16 {PRUNING}"),
                (2, 1, "--growth.criterion gradient --growth.budget 8"),
                (1, 2, "--growth.criterion random --precision bf16"),
                (1, 2, "--growth.criterion incrt --compile true"),
            ]
        ),
    ],
)
def test_a_run_cut_off_at_any_step_gives_the_same_curve(small_folder, tmp_path, ranks, stage, flags):
    shared = """--growth.interval 2 --growth.calibration 1 --growth.maximum 3 --growth.until 11
        --growth.patience 2 --growth.grow_above 1e-6 --validation.every 5 --checkpoint.every 5
        --checkpoint.keep_last 9 --steps 14"""
    shared += " --growth.head_dim 16" * ("head_dim" not in flags)
    run = nano_run(small_folder, tmp_path, *shared.split(), *flags.split())
    # In the step after an event, in one that is saved for itself, and later.
    broken = broken_off(run, 4, 5, 9, ranks=ranks, stage=stage)
    state, other = (read_state(each.folder / "checkpoints/step_000014") for each in (run, broken))
    assert state.record("growth") == other.record("growth")
    events = state.record("growth")["events"]
    assert len(events) >= 3
    if PRUNING in flags:
        assert {event["kind"] for event in events} == {"grow", "prune"}
    else:
        assert sum(ModelConfig.from_json(state.model).heads) > 4


def test_a_grown_run_is_an_ordinary_model(small_folder, tmp_path):
    run = growing(small_folder, tmp_path, "--growth.head_dim 16", schedule={2: "1,2,1,3"})
    run_distributed(session, 1, run, 2)
    saved = SavedRun.open(run.folder)
    assert saved.model.heads == GROWN and saved.model.head_dim == (16,) * 4
    with torch.no_grad():
        assert saved.load_model()(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()
    rows = curve(run.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[1]["growth/heads/layer_3"] == 3 and rows[1]["growth/gamma/layer_3"] > 0
    # convert compares the logits of both.
    assert convert.main([str(run.folder), "--out", str(tmp_path / "hf")]) == 0
    assert generate.main([str(run.folder), "--prompt", "def ", "--tokens", "4"]) == 0
    # Without growth its heads stay, and it goes on.
    on = nano_run(small_folder, tmp_path, "--steps", "7", "--validation.every", "0")
    assert run_distributed(session, 1, on, 2)[0][1] is None
    assert ModelConfig.from_json(read_state(run.folder / "checkpoints/step_000007").model).heads == GROWN
    # Trained again from scratch, with the schedule that was found.
    again = nano_run(small_folder, tmp_path / "again", "--model", str(run.folder), "--steps", "1")
    assert again.build_model_config().heads == GROWN
    assert run_distributed(session, 1, again, 2)[0] == ([], None)


def test_a_run_of_fixed_heads_goes_on_with_growth(small_folder, tmp_path):
    fixed = nano_run(small_folder, tmp_path, "--steps", "2", "--validation.every", "0")
    run_distributed(session, 1, fixed, 2)
    heads = fixed.build_model_config().heads
    flags = "--growth.criterion random --growth.interval 1 --growth.calibration 1"
    more = growing(small_folder, tmp_path, f"{flags} --growth.maximum {max(heads) + 1}")
    assert run_distributed(session, 1, more, 2)[0][1] is None
    found = ModelConfig.from_json(read_state(more.folder / "checkpoints/step_000006").model)
    assert sum(found.heads) > sum(heads)
    assert found.head_dim == tuple(48 // count for count in heads)


def gradient_of_a_candidate(run):
    """A candidate's gradient norm, and the norm of the gradient that its output has once it is in the
    network."""
    opened = build(run, Shape(1, 2))
    engine = opened.trainer.engine
    layer, d = 2, opened.model_config.d_model
    batches = [opened.micro_batch(0, index) for index in range(opened.batch.accumulation)]
    generator = torch.Generator().manual_seed(5)
    head = Candidate(*(torch.randn(16, d, generator=generator) * 0.1 for _ in range(3)))
    measured = gradient_norms(engine, batches, {layer: head}, opened.world)[layer]
    grown = opened.model_config.replace(heads=tuple(1 + (index == layer) for index in range(4)))
    network = Transformer(grown)
    weights = dict(engine.module.named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.zero_()
            parameter[tuple(slice(0, size) for size in weights[name].shape)].copy_(weights[name])
        attention = network.layers[layer].attention
        for part, new in zip((attention.q, attention.k, attention.v), head, strict=True):
            part.weight[16:] = new
    for batch in batches:
        (network(*batch) / len(batches)).backward()
    return measured, torch.linalg.matrix_norm(attention.o.weight.grad[:, 16:]).item()


def moments_of_a_batch(run, ranks):
    """The second moments that growth measures, and those of the norms' outputs, in fp64, of the global
    batch."""
    opened = build(run, Shape(ranks, 2))
    engine = opened.trainer.engine
    batches = [opened.micro_batch(0, index) for index in range(opened.batch.accumulation)]
    measured = second_moments(engine, batches, opened.world)
    network = Transformer(opened.model_config).double()
    network.load_state_dict({name: weight.double() for name, weight in engine.module.state_dict().items()})
    rows = []
    for block in network.layers:
        block.attention_norm.register_forward_hook(
            lambda module, given, output: rows.append(output.flatten(0, 1))
        )
    tokens = torch.from_numpy(opened.sequences.batch(0, 8))
    with torch.no_grad():
        network(tokens[:, :-1])
    return measured, [(part.T @ part / len(part)).float() for part in rows]


GRADIENT = "--growth.criterion gradient --growth.interval 2 --growth.calibration 1 --growth.budget 7"


@pytest.mark.parametrize(
    ("criterion", "splits"),
    [
        (INCRT, [(1, 8), (2, 1), (2, 8, 2)]),
        *slow(
            [
                (f"{GRADIENT} --document_mask true", [(1, 8), (1, 1), (2, 2), (2, 4, 2), (4, 1, 4)]),
                (f"{INCRT} --tensor_parallel 2 --growth.head_dim 12", [(2, 8), (4, 2), (4, 4, 2)]),
            ]
        ),
    ],
)
def test_events_depend_neither_on_ranks_nor_on_the_micro_batch(small_folder, tmp_path, criterion, splits):
    """At a rate at which rounding does not grow."""
    events, values = [], []
    for ranks, micro_batch, *context in splits:
        flags = f"{criterion} --growth.maximum 3 --micro_batch {micro_batch} --optimizer.learning_rate 3e-4"
        flags += "".join(f" --context_parallel {c}" for c in context)
        run = growing(small_folder, tmp_path / f"{ranks}-{micro_batch}-{context}", flags, steps=8)
        assert run_distributed(session, ranks, run, timeout=120)[0] == ([], None)
        found = read_state(run.folder / "checkpoints/step_000008").record("growth")["events"]
        rows = [row for row in curve(run.folder) if "growth/gamma/layer_0" in row]
        events.append([(each["step"], each["layer"], each["head"], each["kind"]) for each in found])
        values.append([{k: v for k, v in row.items() if k.startswith("growth/")} for row in rows])
    assert len(events[0]) >= 3 and len(values[0]) >= 3
    assert events == [events[0]] * len(splits)
    for rows in values[1:]:
        for row, expected in zip(rows, values[0], strict=True):
            assert row == pytest.approx(expected, rel=2e-4)


def test_second_moments_are_those_of_the_norms_outputs(small_folder, tmp_path):
    run = growing(small_folder, tmp_path, "--growth.criterion incrt")
    for measured, expected in run_distributed(moments_of_a_batch, 2, run, 2):
        for found, right in zip(measured, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_the_values_of_a_run_are_those_of_its_weights(small_folder, tmp_path):
    """Γ and λ_max of the last check, from a checkpoint's weights, second moments and captured directions, in
    fp64."""
    run = growing(small_folder, tmp_path, f"{INCRT} --growth.until 6", steps=7)
    assert run_distributed(session, 1, run, 2)[0] == ([], None)
    folder = run.folder / "checkpoints/step_000006"  # written for an event, with the weights before it
    checkpoint, features = UnshardedCheckpoint.open(folder), read_features(folder)
    row = next(row for row in curve(run.folder) if row["step"] == 6)
    events = [event for event in checkpoint.state.record("growth")["events"] if event["step"] == 6]
    assert events
    for layer in range(4):
        q, k = (checkpoint.parameter(f"layers.{layer}.attention.{part}.weight").double() for part in "qk")
        c = features[f"growth/second_moment/layer_{layer}"].double()
        captured = features[f"growth/captured/layer_{layer}"].double()
        grown_now = sum(event["layer"] == layer for event in events)
        captured = captured[: len(captured) - grown_now]  # as it was measured
        skew = (q.T @ k - k.T @ q) / 2
        projector = torch.eye(len(c), dtype=torch.float64) - captured.T @ captured
        energy = projector @ (c @ skew - skew @ c) @ projector / 2
        values, vectors = torch.linalg.eigh(energy)
        if (values[-1] - values[-2]) / values[-1] >= 0.1:
            found = features[f"growth/top/layer_{layer}"].double()
            sign = 1 if found @ vectors[:, -1] > 0 else -1
            assert torch.linalg.vector_norm(found - sign * vectors[:, -1]) < 0.01
        assert row[f"growth/lambda_max/layer_{layer}"] == pytest.approx(values[-1].item(), rel=1e-2)
        gamma = torch.linalg.matrix_norm(energy).item()
        assert row[f"growth/gamma/layer_{layer}"] == pytest.approx(gamma, rel=1e-3)


@pytest.mark.parametrize(
    "more", ["--document_mask true", "--architecture.attention_gate head --architecture.z_loss 10"]
)
def test_the_gradient_is_that_of_the_head_in_the_network(small_folder, tmp_path, more):
    """Of the loss that is trained, over the global batch."""
    run = growing(small_folder, tmp_path, f"--growth.criterion gradient --growth.head_dim 16 {more}")
    [(measured, expected)] = run_distributed(gradient_of_a_candidate, 1, run)
    assert measured > 0 and math.isclose(measured, expected, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("flags", "schedule", "message"),
    [
        ("--growth.start 4 --growth.maximum 2", None, "growth.maximum: 2 is below the 4 heads that growth"),
        ("--heads 1,2,3,4", None, "heads: '1,2,3,4' contradicts growth.criterion incrt"),
        ("--growth.head_dim 7", None, "head_dim: layer 0 has 7; positions 'rope' needs an even head dim"),
        ("--growth.prune_share 2", None, "growth.prune_share: 2 is not valid; give a number below 1"),
        ("--architecture.kv_heads [1,1,1,1]", None, "growth.criterion: incrt is not for grouped queries"),
        (
            '--growth.schedule {"2":"2x4"}',
            None,
            "growth.schedule: {2: '2x4'} does not go with growth.criterion incrt",
        ),
        ("--growth.interval 0", None, "growth.interval: 0 is not valid"),
        ("--growth.budget 3", None, "growth.budget: 3 is below the 4 heads that growth"),
        ("", {9: "2x4"}, "growth.schedule: '2x4' at step 9 is not valid; give steps from 1 to 5"),
        ("", {2: "9x4"}, "growth.schedule: '9x4' at step 2 is not valid"),
        ("", {2: "uniform(4) + 1"}, "growth.schedule: 'uniform(4) + 1' is not valid"),
        ("", {2: "uniform(2)", 3: "1x4"}, "growth.schedule: '1x4' at step 3 is not valid"),
        (
            "--growth.budget 7",
            {2: "2x4"},
            "growth.schedule: 2x4 are 8 heads, and growth.budget is 7; give fe",
        ),
        ("", {2: "2x3"}, "growth.schedule: '2x3' at step 2 is not valid"),
        ("", {2: "2x4", 3: "1x4"}, "growth.schedule: '1x4' at step 3 is not valid"),
    ],
)
def test_bad_settings_are_one_line(small_folder, tmp_path, flags, schedule, message):
    flags = flags if schedule else f"--growth.criterion incrt {flags}"
    with refused(begins=message):
        growing(small_folder, tmp_path, flags, schedule=schedule).build_model_config()


@pytest.mark.slow
def test_a_head_dim_that_ranks_do_not_divide(small_folder, tmp_path):
    flags = "--growth.criterion incrt --growth.head_dim 16 --tensor_parallel 3 --architecture.ffn_width 96"
    run = growing(small_folder, tmp_path, f"{flags} --global_batch_tokens 768")
    _, problem = run_distributed(session, 3, run, 2)[0]
    assert problem.startswith("growth.head_dim: 16 is not a multiple of tensor_parallel 3")
