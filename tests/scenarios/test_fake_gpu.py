"""Without a GPU: all that training, sampling and measuring compute is on one device, no value is read from it
in a step, and every kind of block compiles to one graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model.attention
from model.decoding import CachedDecoder
from model.documents import varlen_head_dim
from model.parameters import parameter_specs
from model.process_grid import ALONE, ProcessGrid, start_grid
from model.transformer import Transformer
from pretrain.config.sections import MuonConfig
from pretrain.diagnostics.forward import ForwardProbe
from pretrain.engine.compiling import compile_network
from pretrain.engine.layout import EngineFlat, contiguous_pieces
from pretrain.engine.matrix_exchange import FlatExchange, describe_matrix
from pretrain.growth.measure import Candidate, gradient_norms, second_moments
from pretrain.optim.muon import MuonAndAdamW
from pretrain.runtime.world import single_world
from tests.helpers.fake_gpu import GPU, fake_gpu, run_with_fake_gpu
from tests.helpers.networks import CONFIGS

pytestmark = pytest.mark.slow
BATCH, LENGTH = 4, 32


def build(
    name: str, dtype: torch.dtype = torch.bfloat16, grid: ProcessGrid = ALONE, **settings
) -> Transformer:
    """A network on the fake GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(GPU):
            return Transformer(CONFIGS[name], grid, **settings)
    finally:
        torch.set_default_dtype(before)


def batch_of(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(BATCH, length, dtype=torch.int64, device=GPU)
    return tokens, torch.zeros_like(tokens)


def offsets_of(documents: int) -> Tensor:
    """Offsets of the rows, the first of which has *documents*."""
    starts = [*range(documents), *range(LENGTH, (BATCH + 1) * LENGTH, LENGTH)]
    return torch.tensor(starts, dtype=torch.int32).to(GPU)


class OnlyGpu(TorchDispatchMode):
    """Inside, no operator may make a tensor elsewhere, but for a scalar; a copy would make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.ndim:
                assert tensor.device == GPU, f"{func} on {tensor.device}"
        return result


def train(network: Transformer, *offsets: Tensor, compiled: bool = False) -> None:
    """Forward and backward."""
    network.zero_grad()
    batch = batch_of()
    network.enter(batch[0])  # rotary tables are made on the CPU, once
    with contextlib.nullcontext() if compiled else OnlyGpu():  # Dynamo does not trace under such a mode
        network(*batch, *offsets).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.device == GPU, name


# ---------------------------------------------------------------------- one device

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"fused": "none"}, False),
    "fp32": ({"dtype": torch.float32, "checkpoint_activations": True}, False),
    "fused": ({"fused": "all"}, False),
    "offsets": ({"fused": "all", "checkpoint_activations": True}, True),  # a kernel keeps documents apart
    "mask": ({"dtype": torch.float32}, True),
}


def step(name: str, way: str) -> None:
    settings, documents = WAYS[way]
    with fake_gpu():
        train(build(name, **settings), *([offsets_of(3)] if documents else []))


# Every second pair: each model in two or three ways.
@pytest.mark.parametrize(("name", "way"), [*itertools.product(CONFIGS, WAYS)][::2])
def test_a_step_is_on_one_device(name, way):
    run_with_fake_gpu(step, name, way)


def decode(name: str) -> None:
    with fake_gpu():
        decoder = CachedDecoder(build(name).eval(), BATCH)
        for count in (5, 1):
            assert decoder.append(batch_of(count)[0]).device == GPU


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_cached_decoding_is_on_one_device(name):
    run_with_fake_gpu(decode, name)


def spoilt(what: str, alone: bool) -> str:
    """What a step says after its masks were made on the CPU, or a value was read; *alone* leaves OnlyGpu
    out."""
    local_mask, attend = model.attention.local_mask, model.attention.attend
    ways: dict[str, tuple[str, Any]] = {
        "mask": (
            "model.transformer.local_mask",
            lambda *given: local_mask(given[0], given[1], torch.device("cpu")),
        ),
        "read": ("model.attention.attend", lambda *given: attend(*given) * given[0].query.sum().item()),
    }
    with mock.patch(ways[what][0], ways[what][1]), fake_gpu():
        try:
            train(build("gptneo_windows"), compiled=alone)
        except Exception as error:
            return type(error).__name__
    return "nothing"


def test_what_is_elsewhere_or_is_read_is_noticed():
    assert run_with_fake_gpu(spoilt, "mask", False) == "AssertionError"
    assert run_with_fake_gpu(spoilt, "mask", True) == "FakeTensorDeviceMismatchError"
    assert run_with_fake_gpu(spoilt, "read", True) == "DataDependentOutputException"


# ---------------------------------------------------------------------- ranks


@contextlib.contextmanager
def rank_of(rank: int, ranks: int, **degrees):
    """The grid of one of *ranks*, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield start_grid(**{"tensor_parallel": 1, **degrees})
    finally:
        dist.destroy_process_group()


GRIDS = {
    "t": {"tensor_parallel": 2},
    "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "c": {"tensor_parallel": 1, "context_parallel": 2},
    "both": {"tensor_parallel": 2, "context_parallel": 2},
}


def step_of_a_rank(names: list[str], degrees: dict) -> None:
    ranks = degrees["tensor_parallel"] * degrees.get("context_parallel", 1)
    with rank_of(ranks - 1, ranks, **degrees) as grid:
        for name, documents in itertools.product(names, (False, True)):
            with fake_gpu():
                train(build(name, grid=grid), *([offsets_of(3)] if documents else []))


@pytest.mark.parametrize("degrees", GRIDS)
def test_a_step_of_ranks_is_on_one_device(degrees):
    names = ["gptneo_windows", "head_gate", "element_gate", "absent", "modern"]
    run_with_fake_gpu(step_of_a_rank, names, GRIDS[degrees])


def muon_step(heads: Any) -> None:
    """A step of this rank's half of all matrices, which travel to their owners and back."""
    settings, specs = MuonConfig(heads=heads), parameter_specs(CONFIGS["head_gate"])
    matrices = {
        name: describe_matrix(spec, CONFIGS["head_gate"], settings)
        for name, spec in specs.items()
        if spec.role.layer is not None and spec.role.kind == "matrix" and spec.shard_dimension is not None
    }
    sizes = [(name, matrix.shape[0] * matrix.shape[1]) for name, matrix in matrices.items()]
    half = sum(size for _, size in sizes) // 2
    with rank_of(1, 2), fake_gpu():
        master = torch.zeros(half, device=GPU)
        group = {"kind": "muon", "params": [master], "lr": 0.1, "weight_decay": 0.1}
        flat = EngineFlat(master, group, contiguous_pieces(sizes, None, half), 1, 2)
        exchange = FlatExchange(flat, matrices, 1, 2)
        optimizer = MuonAndAdamW([group], settings)
        optimizer.updates = lambda _, values: exchange(values, settings, GPU)
        master.grad = torch.ones_like(master)
        with OnlyGpu():
            optimizer.step()
        assert {value.device for value in optimizer.state[master].values()} == {GPU}


@pytest.mark.parametrize("heads", ["whole", "each"])
def test_muon_is_on_one_device(heads):
    run_with_fake_gpu(muon_step, heads)


# ---------------------------------------------------------------------- measurements


class Engine(SimpleNamespace):
    """What measurements ask of DeepSpeed's engine."""

    def __call__(self, *given: Tensor) -> Tensor:
        return self.module(*given)

    def eval(self) -> None:
        self.module.eval()

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def zero_optimization_stage(self) -> int:
        return 2


def measure(name: str) -> None:
    config, world = CONFIGS[name], single_world(GPU)
    with fake_gpu(read_values=True):
        engine = Engine(module=build(name))
        batches = [[tensor.cpu() for tensor in batch_of()]]
        if all(config.heads):
            moments = second_moments(engine, batches, world)
            assert {moment.device for moment in moments} == {GPU}
            width, dim = config.layer_width(1), config.layer_head_dim(1)
            head = Candidate(*(torch.zeros(dim, width) for _ in range(3)))
            gradient_norms(engine, batches, {1: head}, world)
    probe = ForwardProbe(config, np.zeros((BATCH, LENGTH + 1), dtype=np.int64), BATCH, world)
    held_out = list(probe.batches)  # on the CPU, whose values may be read
    with (
        mock.patch.object(type(probe.batches), "__iter__", lambda _: iter(held_out)),
        mock.patch.object(FakeTensor, "tolist", lambda present: [True] * len(present)),
        fake_gpu(read_values=True),
    ):
        result = probe.run(Engine(module=build(name)))
        assert {tensor.device.type for tensor in (*result.heads, result.layers)} == {"cpu"}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_growth_and_diagnostics_are_on_one_device(name):
    run_with_fake_gpu(measure, name)


# ---------------------------------------------------------------------- graphs


def kinds_of(network: Transformer, documents: bool) -> int:
    """How many blocks differ in what they compute: parameters, heads, rotated dims, and windows that are not
    in a document mask."""
    config, kinds = network.config, set()
    for layer, block in enumerate(network.layers):
        rotary, window = config.layer_rotary(layer), config.layer_window(layer)
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        masked = documents and not varlen_head_dim(config.layer_head_dim(layer))
        seen = window if window and window < LENGTH and not masked else None
        kinds.add((shapes, config.heads[layer], config.layer_kv_heads(layer), rotary and rotary[0], seen))
    return len(kinds)


def count_graphs(name: str, documents: bool = False, degrees: dict | None = None) -> tuple[int, list[int]]:
    """The kinds of blocks, and how many graphs there are after each of two steps. A break is an error."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    counts, noting = [], functools.partial(torch.compile, backend=note, fullgraph=True)
    with (
        rank_of(1, 2, **degrees) if degrees else contextlib.nullcontext(ALONE) as grid,
        mock.patch.object(torch, "compile", noting),
        fake_gpu(),
    ):
        network = build(name, grid=grid, fused="all")
        compile_network(network)
        for more in range(2):
            train(network, *([offsets_of(3 + more)] if documents else []), compiled=True)
            counts.append(len(graphs))
    return kinds_of(network, documents), counts


@pytest.mark.parametrize(
    ("name", "documents"), [(name, number % 2 == 0) for number, name in enumerate(sorted(CONFIGS))]
)
def test_every_kind_of_block_is_one_graph(name, documents):
    """And the final norm and the loss are one each; a step with another number of documents adds none."""
    kinds, counts = run_with_fake_gpu(count_graphs, name, documents)
    assert counts == [kinds + 2, kinds + 2]


@pytest.mark.parametrize("degrees", ["t", "sequence"])
@pytest.mark.parametrize("name", ["grouped", "gptneo_windows", "head_gate", "element_gate", "absent"])
def test_every_kind_of_block_is_one_graph_of_tensor_parallel_ranks(name, degrees):
    """The loss is not compiled there. With context parallelism attention is not in a graph."""
    kinds, counts = run_with_fake_gpu(count_graphs, name, False, GRIDS[degrees])
    assert counts == [kinds + 1, kinds + 1]
