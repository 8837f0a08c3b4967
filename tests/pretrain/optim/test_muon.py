"""Muon inside ZeRO: the update is a function of the whole matrix's gradients, in every shape of the world."""

import itertools
import math

import pytest
import torch

from model.parameters import parameter_specs
from pretrain.engine.build import build_engine
from pretrain.engine.layout import engine_flats, inner_optimizer
from pretrain.optim.groups import run_groups
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import Shape, build, shape_run
from tests.pretrain.optim.reference import muon_updates

# Three heads (which t = 2 and 4 cut), one head, and grouped queries.
MODEL = [
    "--architecture.d_model 48 --heads 3x1,1x1,6x1,4x1 --architecture.kv_heads 3x1,1x1,2x1,2x1",
    "--architecture.ffn_width 96 --global_batch_tokens 768 --optimizer.kind muon",
]
HEADS = [(3, 3, 16), (1, 1, 48), (6, 2, 8), (4, 2, 12)]  # queries, keys and values, head dim
STEPS = 3
OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)


def flat_pieces(engine, read):
    """[(parameter, tensor rank, first element, values)] of what *read* finds in this rank's flat tensors."""
    return [
        (
            name,
            engine.checkpoint_mp_rank,
            piece.start,
            values[piece.offset : piece.offset + piece.numel].clone(),
        )
        for flat in engine_flats(engine)
        for values in [read(flat.master)]
        for name, pieces in flat.pieces.items()
        for piece in pieces
    ]


def recorded_steps(run, shape):
    """What this rank's optimizer got and did in each step: pieces of gradients, of weights before and after,
    and the norm that was reported."""
    session = build(run, shape)
    ds_config, grid = session.decisions.ds_config.value, session.world.grid
    engine = build_engine(run, session.model, ds_config, grid, **session.decisions.kernels())
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
            group["lr"], group["weight_decay"] = (1.0, 0.0) if group["kind"] == "muon" else (1e-3, 0.0)
        before = flat_pieces(engine, lambda master: master.detach())
        for micro in range(session.batch.accumulation):
            batch = session.micro_batch(index * session.batch.sequences, micro)
            engine.backward(engine(*batch))
            engine.step()
        found = [flat_pieces(engine, gradients.__getitem__), before]
        found.append(flat_pieces(engine, lambda master: master.detach()))
        steps.append((*found, engine.get_global_grad_norm()))
    return steps


def assembled(ranks, specs, t):
    """Whole tensors by name, from the pieces of all ranks."""
    whole = {}
    for name, tensor_rank, start, values in itertools.chain(*ranks):
        spec = specs[name]
        if spec.role.kind != "matrix" or spec.role.layer is None:
            continue
        shape = list(spec.shape)
        shape[spec.shard_dimension] //= t
        shards = whole.setdefault(name, torch.full((t, math.prod(shape)), math.nan))
        shards[tensor_rank, start : start + values.numel()] = values
    shapes = {
        name: [n // (t if d == specs[name].shard_dimension else 1) for d, n in enumerate(specs[name].shape)]
        for name in whole
    }
    return {
        name: torch.cat(shards.view(t, *shapes[name]).unbind(), specs[name].shard_dimension)
        for name, shards in whole.items()
    }


def head_rows(role, each):
    """Row indices of each head of a matrix whose heads lie along its rows (o is transposed)."""
    queries, keys, head_dim = HEADS[role.layer]
    count = {"q": queries, "o": queries, "k": keys, "v": keys}.get(role.part)
    if not each or count is None:
        return [None]
    return list(torch.arange(count * head_dim).split(head_dim))


WORLDS = [
    (Shape(2, 2, tensor_parallel=2), "--muon.heads each"),
    (Shape(2, 3), "--micro_batch 2"),
    (Shape(1, 1), "--muon.heads each --muon.nesterov false"),
]
SLOW_WORLDS = [
    (Shape(1, 2, "bf16"), "--micro_batch 3"),
    (Shape(3, 1, "bf16"), "--muon.heads each"),
    (Shape(4, 3, zero=(("sub_group_size", 20000),), tensor_parallel=2), "--muon.heads each --micro_batch 1"),
    (Shape(4, 1, tensor_parallel=4), "--muon.heads each --sequence_parallel true"),
    (Shape(4, 2, "bf16", tensor_parallel=4), "--micro_batch 2"),
    (Shape(3, 2, tensor_parallel=3), "--muon.heads each"),
    (Shape(4, 3), "--muon.heads each"),
    (Shape(2, 1, zero=OFFLOAD), "--micro_batch 2"),
    (Shape(4, 2, zero=OFFLOAD, tensor_parallel=2), "--muon.heads each --micro_batch 2"),
    (Shape(2, 3, zero=OFFLOAD), "--muon.heads each --micro_batch 2"),
    (Shape(2, 3, "bf16", zero=OFFLOAD), "--muon.heads each"),
]


@pytest.mark.parametrize(
    ("shape", "flags"),
    WORLDS + [pytest.param(*world, marks=pytest.mark.slow) for world in SLOW_WORLDS],
    ids=str,
)
def test_the_update_is_that_of_the_whole_matrix(small_folder, tmp_path, shape, flags):
    """Against fp64, from the gradients that the optimizer got: within 1e-5."""
    run = shape_run(small_folder, tmp_path, shape, *MODEL, flags)
    ranks = run_distributed(recorded_steps, shape.ranks, run, shape, timeout=300)
    specs, t = parameter_specs(run.build_model_config(600)), shape.tensor_parallel
    steps = [[assembled([rank[n][k] for rank in ranks], specs, t) for k in range(3)] for n in range(STEPS)]
    muon = {
        name
        for group in run_groups(run, run.build_model_config(600))
        if group.name == "base/muon"
        for name in group.parameters
    }
    assert steps[0][0].keys() == muon and len(muon) == 4 * 7
    for name in sorted(muon):
        role = specs[name].role
        turned = (lambda m: m.T) if role.part == "o" else (lambda m: m)
        gradients = [turned(step[0][name]) for step in steps]
        settings = (0.95, run.muon.nesterov, head_rows(role, run.muon.heads == "each"))
        for expected, (_, before, after) in zip(muon_updates(gradients, *settings), steps, strict=True):
            found = turned(before[name].double() - after[name].double())
            assert (found - expected).norm() <= 1e-5 * expected.norm(), name
    norms = {step[3] for rank in ranks for step in rank[:1]}
    assert max(norms) - min(norms) < 1e-6 and min(norms) > 0.1  # of gradients, not of updates
