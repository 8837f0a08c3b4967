"""Describes how ZeRO cuts parameters into the flat tensors of an engine's ranks, and lets them be changed.

Stages 1 and 2 lay a group's parameters end to end in one flat tensor and give every rank an equal part of it,
so that a parameter may lie on several ranks. Stage 3 cuts every parameter into one slice per rank and lays a
rank's slices of a sub-group (parameters of one group, about sub_group_size elements) end to end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

Named = Sequence[tuple[str, int]]
"""Parameters in order: name, and number of elements on one tensor-parallel rank."""


def weights_are_finite(engine: Any) -> bool:
    """Whether what this rank holds of the weights is free of NaN and infinity."""
    parts = (getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters())
    return all(bool(part.isfinite().all()) for part in parts)


@dataclass(frozen=True)
class Piece:
    """A contiguous range of a parameter's elements inside one data-parallel rank's flat tensor."""

    rank: int
    """Data-parallel rank that holds it."""
    offset: int
    """Its first element in that rank's flat tensor."""
    start: int
    """Its first element in the flattened parameter."""
    numel: int
    """Number of elements, padding not included."""


def contiguous_pieces(
    parameters: Named, paddings: Sequence[int] | None, partition: int
) -> dict[str, list[Piece]]:
    """Return the pieces of a group in stages 1 and 2, by parameter, in the order of their elements.

    Args:
        parameters: the group's parameters in the order of the flat tensor.
        paddings: unused elements after each parameter; None for none.
        partition: elements of the flat tensor that each rank holds.
    """
    pieces: dict[str, list[Piece]] = {}
    begin = 0
    for index, (name, numel) in enumerate(parameters):
        parameter_pieces = pieces[name] = []
        position = begin
        while position < begin + numel:
            rank, offset = divmod(position, partition)
            length = min(begin + numel - position, partition - offset)
            parameter_pieces.append(Piece(rank, offset, position - begin, length))
            position += length
        begin += numel + (paddings[index] if paddings else 0)
    return pieces


def sliced_pieces(parameters: Named, ranks: int) -> dict[str, list[Piece]]:
    """Return the pieces of a sub-group in stage 3, by parameter, in the order of their elements.

    Every slice is as long as the first; the last ones are padded.
    """
    pieces: dict[str, list[Piece]] = {}
    offset = 0
    for name, numel in parameters:
        length = -(-numel // ranks)  # of each rank, padding included
        starts = range(0, numel, length)
        pieces[name] = [
            Piece(rank, offset, start, min(length, numel - start)) for rank, start in enumerate(starts)
        ]
        offset += length
    return pieces


@dataclass(frozen=True)
class EngineFlat:
    """One flat tensor of this rank's optimizer."""

    master: Tensor
    """fp32 weights of the pieces, padded: the tensor that Adam steps."""
    group: dict[str, Any]
    """Adam's parameter group that it belongs to."""
    all_pieces: dict[str, list[Piece]]
    """The pieces of its parameters on all data-parallel ranks, in the order of the flat tensor."""
    rank: int
    """This data-parallel rank."""
    ranks: int
    """Number of data-parallel ranks."""

    @functools.cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's pieces in it, by parameter; parameters that lie on other ranks have none."""
        return self.pieces_of(self.rank)

    def pieces_of(self, rank: int) -> dict[str, list[Piece]]:
        """The pieces of a data-parallel rank."""
        return {
            name: [piece for piece in pieces if piece.rank == rank]
            for name, pieces in self.all_pieces.items()
        }


def inner_optimizer(engine: Any) -> Any:
    """The optimizer inside ZeRO's, which steps the fp32 masters and holds their moments."""
    return engine.optimizer.optimizer


def tensor_place(engine: Any) -> tuple[int, int]:
    """Return t, and this rank's index among the t ranks that share one copy of the model."""
    return engine.mp_world_size, engine.checkpoint_mp_rank


def shard_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter on this tensor-parallel rank, by name; gathered at stage 3."""
    return {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for parameter, name in engine.param_names.items()
    }


def engine_flats(engine: Any) -> list[EngineFlat]:
    """List the flat tensors of this rank's optimizer, with the pieces in them."""
    optimizer, names = engine.optimizer, engine.param_names
    groups = inner_optimizer(engine).param_groups
    flats = []
    if engine.zero_optimization_stage() == 3:
        for index, parameters in enumerate(optimizer.fp16_groups):
            process_group = optimizer.sub_group_process_groups[index]
            named = [(names[p], p.ds_numel) for p in parameters]
            ranks = dist.get_world_size(process_group)
            pieces = sliced_pieces(named, ranks)
            master = optimizer.fp32_partitioned_groups_flat[index]
            group = groups[optimizer.sub_group_to_group_id[index]]
            flats.append(EngineFlat(master, group, pieces, dist.get_rank(process_group), ranks))
        return flats
    if hasattr(optimizer, "bf16_groups"):  # BF16_Optimizer
        layout, paddings = optimizer.bf16_groups, [None] * len(optimizer.bf16_groups)
        masters = optimizer.fp32_groups_flat_partition
    else:
        layout, paddings = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_padding
        masters = optimizer.single_partition_of_fp32_groups
    for index, (parameters, padding, master) in enumerate(zip(layout, paddings, masters, strict=True)):
        named = [(names[p], p.numel()) for p in parameters]
        pieces = contiguous_pieces(named, padding, master.numel())
        process_group = optimizer.real_dp_process_group[index]
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        flats.append(EngineFlat(master, groups[index], pieces, rank, ranks))
    return flats


@contextlib.contextmanager
def changing_masters(engine: Any) -> Iterator[None]:
    """Let the block change masters and moments of this rank; afterwards the weights that the model computes
    with are those of the masters. Collective at begin and end, unless the block raises."""
    optimizer, partitioned = engine.optimizer, engine.zero_optimization_stage() == 3
    if partitioned:
        optimizer.checkpoint_event_prologue()  # no rank holds a gathered weight while slices are written
    yield
    if partitioned:
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # weights too small to be partitioned are gathered again
        return
    optimizer.update_lp_params()
    # The tensor-access functions (safe_get_full_optimizer_state) find the moments through these links.
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def set_counters(engine: Any, steps: int, skipped: int, samples: int) -> None:
    """Set the engine's counts of steps, of those of which the update was skipped, and of sequences."""
    engine.global_steps, engine.skipped_steps, engine.global_samples = steps, skipped, samples
