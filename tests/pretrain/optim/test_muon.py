"""Muon inside ZeRO: the update is a function of the whole matrix's gradients, in every shape of the world."""

import math

import pytest
import torch

from model.parameters import parameter_specs
from pretrain.diagnostics.weights import engine_update_row
from pretrain.engine.layout import engine_flats, inner_optimizer
from pretrain.optim.groups import run_groups
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import Shape, build, shape_run
from tests.helpers.training import engine_of
from tests.pretrain.optim.reference import muon_updates

# Three heads (which t = 2 and 4 cut), one head, and grouped queries.
CLIPPING = 0.05
MODEL = [
    "--architecture.d_model 48 --heads 3x1,1x1,6x1,4x1 --architecture.kv_heads 3x1,1x1,2x1,2x1",
    "--architecture.ffn_width 96,48,0,144 --architecture.block_width 48,72,36,48",
    "--architecture.attention_gate element --global_batch_tokens 768",
    f"--optimizer.kind muon --optimizer.gradient_clipping {CLIPPING}",
]
STEPS = 3
RATE, DECAY = 0.5, 0.2  # of Muon's groups; apart from 1, so that a missing factor shows
OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)


def flat_pieces(engine, read):
    """[(parameter, tensor rank, first element, values)] of what *read* finds in this rank's flat tensors."""
    return [
        (name, engine.checkpoint_mp_rank, p.start, values[p.offset : p.offset + p.numel].clone())
        for flat in engine_flats(engine)
        for values in [read(flat.master)]
        for name, pieces in flat.pieces.items()
        for p in pieces
    ]


def recorded_steps(run, shape):
    """What this rank's optimizer got and did in each step: pieces of gradients, of weights before and after;
    the norm and the diagnostics that were reported."""
    session = build(run, shape)
    ds_config, grid = session.decisions.ds_config.value, session.world.grid
    engine = engine_of(run, session.model_config, ds_config, grid, **session.decisions.kernels())
    inner, gradients = inner_optimizer(engine), {}
    original = inner.step

    def step():
        for group in inner.param_groups:
            gradients.update({master: master.grad.clone() for master in group["params"]})
        original()

    inner.step = step
    steps = []
    for index in range(STEPS):
        for group in inner.param_groups:
            muon = group["kind"] == "muon"
            group["lr"], group["weight_decay"] = (RATE, DECAY) if muon else (1e-3, 0.0)
        before = flat_pieces(engine, lambda master: master.detach())
        for micro in range(session.batch.accumulation):
            batch = session.micro_batch(index * session.batch.sequences, micro)
            engine.backward(engine(*batch))
            engine.step()
        found = [flat_pieces(engine, gradients.__getitem__), before]
        found.append(flat_pieces(engine, lambda master: master.detach()))
        figures = engine_update_row(engine, parameter_specs(session.model_config))
        steps.append((*found, float(engine.get_global_grad_norm()), figures))
    return steps


def assembled(ranks, specs, t):
    """Whole tensors by name, from the pieces of all ranks."""
    shards = {}
    for name, tensor_rank, start, values in (piece for pieces in ranks for piece in pieces):
        spec = specs[name]
        if spec.vocabulary:
            continue
        shape = list(spec.shape)
        if spec.shard_dimension is not None:
            shape[spec.shard_dimension] //= t
        part = shards.setdefault((name, tensor_rank), torch.full(shape, math.nan))
        part.view(-1)[start : start + values.numel()] = values
    names = dict.fromkeys(name for name, _ in shards)
    cut = {name: specs[name].shard_dimension for name in names}
    return {
        name: shards[name, 0]
        if cut[name] is None
        else torch.cat([shards[name, rank] for rank in range(t)], cut[name])
        for name in names
    }


def norm_of(ranks, specs):
    """Of all gradients; what tensor parallelism does not cut counts once."""
    pieces = (piece for rank in ranks for piece in rank)
    return math.sqrt(
        sum(
            values.double().square().sum().item()
            for name, tensor_rank, _, values in pieces
            if specs[name].shard_dimension is not None or tensor_rank == 0
        )
    )


def head_rows(role, model, group):
    """Row indices of each head, or group of so many, of a matrix whose heads lie along its rows (o is
    transposed)."""
    head_dim, heads = model.layer_head_dim(role.layer), model.heads[role.layer]
    kv_heads = model.kv_heads[role.layer]
    count = {"q": heads, "o": heads, "gate": heads, "k": kv_heads, "v": kv_heads}
    if group == "whole" or role.part not in count:
        return [None]
    return list(torch.arange(count[role.part] * head_dim).split((1 if group == "each" else group) * head_dim))


WORLDS = [
    (Shape(2, 2, tensor_parallel=2), "--muon.heads each"),
    (Shape(1, 1), "--muon.heads each --muon.nesterov false"),
]
SLOW_WORLDS = [
    (Shape(2, 3), "--micro_batch 2 --muon.heads 2"),  # of 3, 1, 6 and 4
    (Shape(3, 1, "bf16"), "--muon.heads each"),
    (Shape(4, 3, zero=(("sub_group_size", 20000),), tensor_parallel=2), "--muon.heads each --micro_batch 1"),
    (Shape(4, 1, tensor_parallel=4), "--muon.heads each --sequence_parallel true"),
    (Shape(2, 1), "--micro_batch 2"),
    (Shape(3, 2, tensor_parallel=3), "--muon.heads 4 --heads 3x4 --architecture.kv_heads 3x4"),
    (Shape(4, 2, zero=OFFLOAD, tensor_parallel=2), "--muon.heads each --micro_batch 2"),
    (Shape(2, 3, "bf16", zero=OFFLOAD), "--muon.heads each"),
]


@pytest.mark.parametrize(
    ("shape", "flags"),
    WORLDS + [pytest.param(*world, marks=pytest.mark.slow) for world in SLOW_WORLDS],
    ids=str,
)
def test_the_update_is_that_of_the_whole_matrix(small_folder, tmp_path, shape, flags):
    """Against fp64, from the gradients that the optimizer got: within 1e-5. Those are clipped."""
    run = shape_run(small_folder, tmp_path, shape, *MODEL, flags)
    ranks = run_distributed(recorded_steps, shape.ranks, run, shape, timeout=300)
    model = run.build_model_config(600)
    specs, t = parameter_specs(model), shape.tensor_parallel
    steps = [[assembled([rank[n][k] for rank in ranks], specs, t) for k in range(3)] for n in range(STEPS)]
    muon = next(group.parameters for group in run_groups(run, model) if group.name == "base/muon")
    assert set(muon) == {n for n in specs if n.startswith("layers.") and "norm" not in n}
    for name in muon:
        role = specs[name].role
        turned = (lambda m: m.T) if role.part == "o" else (lambda m: m)
        settings = (0.95, run.muon.nesterov, head_rows(role, model, run.muon.heads))
        references = muon_updates([turned(step[0][name]) for step in steps], *settings)
        for expected, (_, before, after) in zip(references, steps, strict=True):
            step_of_updates = turned(before[name].double() * (1 - RATE * DECAY) - after[name].double())
            assert (step_of_updates - RATE * expected).norm() <= 1e-5 * RATE * expected.norm(), name
    for step, (_, before, after) in enumerate(steps):
        (norm, figures), *others = {(rank[step][3], tuple(rank[step][4].items())) for rank in ranks}
        assert not others and norm > 2 * CLIPPING  # of the gradients, before they were clipped
        assert norm_of([rank[step][0] for rank in ranks], specs) == pytest.approx(CLIPPING, rel=2e-3)
        # What is reported leaves the decay out.
        decayed = {name: before[name].double() * (1 - RATE * DECAY) for name in muon}
        update = torch.cat([(decayed[name] - after[name]).flatten() for name in muon])
        weight = torch.cat([after[name].flatten() for name in muon]).double()
        sizes = {
            "effective_lr": update.square().mean().sqrt(),
            "relative_update": update.norm() / weight.norm(),
        }
        for figure, size in sizes.items():
            assert dict(figures)[f"diagnostics/{figure}/base/muon"] == pytest.approx(size.item(), rel=1e-4)
