"""Brings matrices that ZeRO and tensor parallelism have cut together, so that Muon's update is that of the
whole matrix.

ZeRO steps one flat tensor at a time, with the same flat tensor on all ranks. Each of its matrices has one
owner among all ranks. The pieces are sent to the owners in one all-to-all, made orthogonal there, and sent
back in another. What is computed is the same at any number of ranks, degree and stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.parameters import ParameterSpec
from pretrain.config.sections import MuonConfig
from pretrain.engine.layout import EngineFlat, engine_flats, inner_optimizer, tensor_place
from pretrain.optim.muon import is_muon, matrix_update


@dataclass(frozen=True)
class Matrix:
    """One matrix of a block."""

    shape: tuple[int, int]
    """In full, [rows, cols]."""
    shard_dimension: int
    """The dimension that tensor parallelism cuts."""
    head: tuple[int, int] | None
    """See pretrain.optim.muon.matrix_update."""

    @property
    def cost(self) -> int:
        """Proportional to the multiplications of one iteration."""
        rows, cols = self.shape
        if self.head is None:
            return rows * cols * min(rows, cols)
        dimension, head_dim = self.head
        return rows * cols * min(head_dim, self.shape[1 - dimension])


def describe_matrix(spec: ParameterSpec, model: ModelConfig, settings: MuonConfig) -> Matrix:
    """Describe a block's matrix, whose heads have its layer's head dim."""
    role = spec.role
    assert len(spec.shape) == 2 and spec.shard_dimension is not None and role.layer is not None
    head = None
    if settings.heads != "whole" and role.part in ("q", "k", "v", "o", "gate"):
        dimension, count = (1 if role.part == "o" else 0), 1 if settings.heads == "each" else settings.heads
        width = count * model.layer_head_dim(role.layer)
        if width < spec.shape[dimension] or settings.heads == "each":
            head = (dimension, width)
    return Matrix((spec.shape[0], spec.shape[1]), spec.shard_dimension, head)


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that computes each matrix: the most expensive first, to the rank with the least to do."""
    loads, owner = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner[index] = loads.index(min(loads))
        loads[owner[index]] += costs[index]
    return owner


class FlatExchange:
    """The exchange of one flat tensor.

    Args:
        flat: this rank's.
        matrices: description of each of its parameters.
        t, data_parallel: of the grid; rank = data rank x t + tensor rank.
    """

    def __init__(self, flat: EngineFlat, matrices: Mapping[str, Matrix], t: int, data_parallel: int) -> None:
        self.t, self.ranks = t, t * data_parallel
        rank = dist.get_rank() if self.ranks > 1 else 0
        owner = dict(
            zip(flat.all_pieces, owners([matrices[n].cost for n in flat.all_pieces], self.ranks), strict=True)
        )
        self.owned = {name: matrices[name] for name in flat.all_pieces if owner[name] == rank}
        # What this rank sends, by owner: the same order in which the owner expects it.
        sent = [
            [p for n, ps in flat.pieces.items() if owner[n] == to for p in ps] for to in range(self.ranks)
        ]
        self.slices = [slice(p.offset, p.offset + p.numel) for pieces in sent for p in pieces]
        self.sent = [sum(piece.numel for piece in pieces) for pieces in sent]
        # What arrives here, by sender: its matrix, the shard, and where in the shard it lies.
        self.places: list[tuple[str, int, slice]] = []
        self.received = []
        for sender in range(self.ranks):
            data_rank, tensor_rank = divmod(sender, t)
            pieces = [(n, p) for n, ps in flat.pieces_of(data_rank).items() if n in self.owned for p in ps]
            self.places += [(n, tensor_rank, slice(p.start, p.start + p.numel)) for n, p in pieces]
            self.received.append(sum(p.numel for _, p in pieces))

    def __call__(self, values: Tensor, settings: MuonConfig, device: torch.device) -> None:
        """Replace *values*, flat, by the updates of its matrices; what lies between them becomes zero."""
        out = torch.cat([values[:0], *(values[part] for part in self.slices)]).to(device)
        arrived = out
        if self.ranks > 1:
            arrived = out.new_empty(sum(self.received))
            dist.all_to_all_single(arrived, out, self.received, self.sent)
        self._compute(arrived, settings)
        if self.ranks > 1:
            dist.all_to_all_single(out, arrived, self.sent, self.received)
        values.zero_()
        lengths = [part.stop - part.start for part in self.slices]
        for part, update in zip(self.slices, out.split(lengths), strict=True):
            values[part].copy_(update)

    def _compute(self, arrived: Tensor, settings: MuonConfig) -> None:
        """Replace the pieces of the owned matrices, one after the other, by those of their updates."""
        pieces: dict[str, list[tuple[Tensor, int, slice]]] = {name: [] for name in self.owned}
        chunks = arrived.split([place.stop - place.start for _, _, place in self.places])
        for (name, tensor_rank, place), chunk in zip(self.places, chunks, strict=True):
            pieces[name].append((chunk, tensor_rank, place))
        for name, matrix in self.owned.items():
            dimension, shape = matrix.shard_dimension, list(matrix.shape)
            shape[dimension] //= self.t
            shards = arrived.new_empty(self.t, math.prod(shape))
            for chunk, tensor_rank, place in pieces[name]:
                shards[tensor_rank, place] = chunk
            whole = torch.cat(shards.view(self.t, *shape).unbind(), dimension)
            update = matrix_update(whole, settings, matrix.head)
            shards.view(self.t, *shape).copy_(torch.stack(update.chunk(self.t, dimension)))
            for chunk, tensor_rank, place in pieces[name]:
                chunk.copy_(shards[tensor_rank, place])


def connect_muon(
    engine: Any, specs: Mapping[str, ParameterSpec], model: ModelConfig, settings: MuonConfig
) -> None:
    """Give the engine's MuonAndAdamW the exchanges of its flat tensors.

    Args:
        specs: those of *model*, from model.parameters.parameter_specs.
    """
    t, _ = tensor_place(engine)
    data_parallel = (dist.get_world_size() if dist.is_initialized() else 1) // t
    exchanges = {}
    for flat in engine_flats(engine):
        if is_muon(flat.group):
            matrices = {name: describe_matrix(specs[name], model, settings) for name in flat.all_pieces}
            exchanges[flat.master] = FlatExchange(flat, matrices, t, data_parallel)
    device = torch.device(engine.device)

    def updates(master: Tensor, values: Tensor) -> None:
        exchanges[master](values, settings, device)

    inner_optimizer(engine).updates = updates
