"""The tensor x context x data grid of processes.

Ranks are laid out tensor first, then context: rank = (data_rank * c + context_rank) * t + tensor_rank. So the
t ranks of a tensor group are neighbours, and on a cluster share a node. At t = c = 1 there is nothing to lay
out.

A grid is passed to the model, to DeepSpeed (pretrain/engine/build.py) and to the run's World; it is not
global.
megatron-core's parallel_state is not used: it would be one grid for the whole process, which layers could
find by themselves, and it makes 17 groups where two are needed at t = 2 (on 512 ranks at t = 8 some 3,000).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from model.parallel_plan import check_world


@dataclass(frozen=True)
class ProcessGrid:
    """One rank's place in the grid. The default is for a single process, or t = 1."""

    tensor_parallel: int = 1
    """t: number of ranks that share one copy of the model."""
    tensor_rank: int = 0
    """Which of them this is: the one that holds the tensor_rank-th part of every sharded parameter."""
    data_parallel: int = 1
    """Number of batches that are read at a time (1 at t = c = 1, where the grid does not know: ask
    torch.distributed)."""
    data_rank: int = 0
    """Index of the batch that this rank works on."""
    tensor_group: Any = None
    """Process group of the ranks that share a copy of the model; None at t = 1."""
    data_group: Any = None
    """Process group of the ranks with the same tensor_rank and context_rank; None (all) at t = c = 1."""
    context_parallel: int = 1
    """c: number of ranks that share the positions of a batch."""
    context_rank: int = 0
    """Which of them this is: it holds chunks context_rank and 2c - 1 - context_rank of 2c."""
    context_group: Any = None
    """Process group of the ranks with the same data_rank and tensor_rank; None at c = 1."""
    replica_group: Any = None
    """Process group of the ranks that hold the same part of the model, data x context, over which ZeRO
    partitions; None, all ranks, at t = 1."""
    context_groups: Mapping[int, tuple[Any, Any]] = field(default_factory=dict)
    """Number g of neighbours in the context group -> process group of those that exchange heads with this
    rank, and of the c / g ranks that gather keys with it (model/context_plan.py)."""
    head_groups: Mapping[int, Any] = field(default_factory=dict)
    """Size r -> process group of the r neighbours in the tensor group that exchange heads with this rank."""
    sequence_parallel: bool = False
    """Whether hidden states between the parallel layers are cut along T instead of being copied."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.data_parallel * self.context_parallel

    @property
    def replica_rank(self) -> int:
        """Which of them this is."""
        return self.data_rank * self.context_parallel + self.context_rank


ALONE = ProcessGrid()
"""The grid of a model that is not sharded."""


def start_grid(
    tensor_parallel: int,
    *,
    sequence_parallel: bool = False,
    timeout: timedelta = timedelta(minutes=30),
    head_group_sizes: Collection[int] | None = None,
    context_parallel: int = 1,
    context_head_ranks: Collection[int] | None = None,
) -> ProcessGrid:
    """Lay out a grid over the ranks of torch.distributed's default group. Collective at t > 1 or c > 1.

    Every call makes new process groups: keep the grid, and pass it to all that need it.

    Args:
        tensor_parallel: t, a divisor of the number of ranks.
        sequence_parallel: see ProcessGrid; without effect at t = 1.
        timeout: longest time that a collective of one of the groups may take.
        head_group_sizes: which head groups a model needs (model.parallel_plan.head_group_sizes); None makes
            those of every divisor of t. On 512 ranks at t = 8 that is 384 groups, each of which all ranks
            take part in making.
        context_parallel: c; t c divides the number of ranks.
        context_head_ranks: the numbers of ranks that exchange heads in a model
            (model.context_plan.head_rank_numbers); None is every divisor of c.

    Raises:
        UserError: t c does not divide the number of ranks.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    check_world(size, tensor_parallel, context_parallel)
    if tensor_parallel == context_parallel == 1:
        return ALONE
    t, c, rank = tensor_parallel, context_parallel, dist.get_rank()
    context = _start_context(size, t, c, timeout, context_head_ranks) if c > 1 else {}
    if t == 1:
        return ProcessGrid(data_parallel=size // c, data_rank=rank // c, **context)
    tensor_group = _make_group_of_this_rank([range(first, first + t) for first in range(0, size, t)], timeout)
    head_groups = {1: None, t: tensor_group}
    for ranks in range(2, t):
        if t % ranks == 0 and (head_group_sizes is None or ranks in head_group_sizes):
            head_groups[ranks] = _make_group_of_this_rank(
                [range(first, first + ranks) for first in range(0, size, ranks)], timeout
            )
    replica_group = _make_group_of_this_rank([range(first, size, t) for first in range(t)], timeout)
    # A rank has a group as soon as it is connected itself. If it went on to fail and leave, a slower one that
    # is still connecting would report that in place of the error. This is a barrier, for which NCCL need not
    # be told a device.
    dist.all_gather_object([None] * size, None)
    return ProcessGrid(
        tensor_parallel=t,
        tensor_rank=rank % t,
        data_parallel=size // (t * c),
        data_rank=rank // (t * c),
        tensor_group=tensor_group,
        replica_group=replica_group,
        head_groups=head_groups,
        sequence_parallel=sequence_parallel,
        **{"data_group": replica_group, **context},
    )


def _start_context(
    size: int, t: int, c: int, timeout: timedelta, head_ranks: Collection[int] | None
) -> dict[str, Any]:
    """The fields of a ProcessGrid with c > 1 that depend on c."""
    blocks = [
        range(first + offset, first + c * t, t) for first in range(0, size, c * t) for offset in range(t)
    ]
    group = _make_group_of_this_rank(blocks, timeout)
    groups = {1: (None, group), c: (group, None)}
    for g in range(2, c):
        if c % g == 0 and (head_ranks is None or g in head_ranks):
            neighbours = [block[first : first + g] for block in blocks for first in range(0, c, g)]
            others = [block[first::g] for block in blocks for first in range(g)]
            groups[g] = (
                _make_group_of_this_rank(neighbours, timeout),
                _make_group_of_this_rank(others, timeout),
            )
    data_group = _make_group_of_this_rank([range(first, size, c * t) for first in range(c * t)], timeout)
    dist.all_gather_object([None] * size, None)  # see start_grid
    return {
        "context_parallel": c,
        "context_rank": dist.get_rank() // t % c,
        "context_group": group,
        "context_groups": groups,
        "data_group": data_group,
    }


def _make_group_of_this_rank(partition: Iterable[Sequence[int]], timeout: timedelta) -> Any:
    """Make a process group for each part of a partition of all ranks, and return this rank's."""
    group_of_this_rank = None
    for members in partition:  # every rank takes part in making every group
        group = dist.new_group(list(members), timeout=timeout)
        if dist.get_rank() in members:
            group_of_this_rank = group
    return group_of_this_rank
