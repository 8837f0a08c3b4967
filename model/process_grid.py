"""The tensor x data grid of processes, and the "mpu" that DeepSpeed is handed.

Ranks are laid out tensor first: the t ranks of a tensor group are neighbours (r = data_rank * t + tensor_rank), so
that on a cluster they share a node. At t = 1 there is nothing to lay out, and megatron-core is not imported.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from model.errors import UserError


@dataclass(frozen=True)
class ProcessGrid:
    """One rank's place in the grid. The default is that of a process which is alone, or at t = 1."""

    tensor_parallel: int = 1
    """t: number of ranks that share one copy of the model."""
    tensor_rank: int = 0
    """Which of them this is: the one that holds the tensor_rank-th part of every sharded parameter."""
    data_parallel: int = 1
    """Number of copies of the model (1 at t = 1, where the grid does not know: ask torch.distributed)."""
    data_rank: int = 0
    """Which copy this rank is part of."""
    tensor_group: Any = None
    """Process group of the ranks with the same data_rank; None at t = 1."""
    data_group: Any = None
    """Process group of the ranks with the same tensor_rank; None, the whole world, at t = 1."""
    head_groups: Mapping[int, Any] = field(default_factory=dict)
    """Size r -> process group of the r neighbours in the tensor group that exchange heads with this rank."""
    sequence_parallel: bool = False
    """Whether hidden states between the parallel layers are cut along T instead of being copied."""

    def head_group(self, ranks: int) -> Any:
        """The group of *ranks* neighbours, which divides t, that this rank belongs to."""
        return self.head_groups[ranks]


ALONE = ProcessGrid()
_grid: ProcessGrid | None = None


def grid() -> ProcessGrid:
    """The grid that start_grid laid out; without one, that of t = 1."""
    return _grid or ALONE


@contextlib.contextmanager
def whole_model() -> Iterator[None]:
    """Models built in this context are whole, whatever the grid: to see what a shard is a part of."""
    global _grid
    kept, _grid = _grid, None
    try:
        yield
    finally:
        _grid = kept


def check_world(world_size: int, tensor_parallel: int) -> None:
    """Refuse a degree that does not divide the number of ranks, naming those that do."""
    if type(tensor_parallel) is not int or tensor_parallel < 1 or world_size % tensor_parallel:
        valid = ", ".join(str(t) for t in range(1, world_size + 1) if world_size % t == 0)
        raise UserError(
            f"tensor_parallel: {tensor_parallel!r} does not divide the {world_size} rank"
            f"{'s' * (world_size > 1)} of this run; valid values are {valid}"
        )


def start_grid(
    tensor_parallel: int, *, sequence_parallel: bool = False, timeout: timedelta = timedelta(minutes=30)
) -> ProcessGrid:
    """Lay out the grid over the ranks of torch.distributed's default group. Collective.

    A second call with the same arguments returns the same grid, one with others replaces it (models that were
    built before keep the groups they were built with).

    Args:
        tensor_parallel: t, a divisor of the number of ranks.
        sequence_parallel: see ProcessGrid; without effect at t = 1.
        timeout: longest time that a collective of one of the groups may take.

    Raises:
        UserError: t does not divide the number of ranks.
    """
    global _grid
    size = dist.get_world_size() if dist.is_initialized() else 1
    check_world(size, tensor_parallel)
    if tensor_parallel == 1:
        _grid = None
    elif (grid().tensor_parallel, grid().sequence_parallel) != (tensor_parallel, sequence_parallel):
        _grid = _lay_out(tensor_parallel, sequence_parallel, timeout)
    return grid()


def _lay_out(tensor_parallel: int, sequence_parallel: bool, timeout: timedelta) -> ProcessGrid:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core lists the optional packages that are missing
        from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    # megatron-core's default order is tensor first: the ranks of a tensor group are neighbours.
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        create_gloo_process_groups=False,
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    head_groups = {1: None, tensor_parallel: tensor_group}
    for ranks in range(2, tensor_parallel):
        if tensor_parallel % ranks == 0:
            for first in range(0, size, ranks):  # every rank takes part in making every group
                members = list(range(first, first + ranks))
                group = dist.new_group(members, timeout=timeout)
                if rank in members:
                    head_groups[ranks] = group
    return ProcessGrid(
        tensor_parallel=tensor_parallel,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        tensor_group=tensor_group,
        data_group=parallel_state.get_data_parallel_group(),
        head_groups=head_groups,
        sequence_parallel=sequence_parallel,
    )


class ModelParallelUnit:
    """The grid under the names that DeepSpeed asks an ``mpu`` for.

    megatron's parallel_state lacks the plain ``get_model_parallel_*``. There is no ``initialize_sequence_parallel``
    here on purpose: an mpu that has it is taken for Ulysses sequence parallelism, and its groups are ignored.
    """

    def __init__(self, of: ProcessGrid) -> None:
        self._grid = of

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's part of every sharded parameter."""
        return self._grid.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """t."""
        return self._grid.tensor_parallel

    def get_tensor_model_parallel_group(self) -> Any:
        """The ranks that share one copy of the model."""
        return self._grid.tensor_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the tensor group's first member."""
        return dist.get_global_rank(self._grid.tensor_group, 0)

    def get_data_parallel_rank(self) -> int:
        """Which copy of the model this rank is part of."""
        return self._grid.data_rank

    def get_data_parallel_world_size(self) -> int:
        """Number of copies of the model."""
        return self._grid.data_parallel

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same part of the model."""
        return self._grid.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return dist.get_process_group_ranks(self._grid.data_group)

    # Without pipelines, model parallelism is tensor parallelism.
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group


def deepspeed_mpu() -> ModelParallelUnit | None:
    """What deepspeed.initialize takes as ``mpu``: None at t = 1, where DeepSpeed needs to know of no grid."""
    return ModelParallelUnit(grid()) if grid().tensor_parallel > 1 else None


def environment_world_size() -> int:
    """Number of ranks as the launcher gave it, 1 without a launcher; known before a process group forms."""
    return int(os.environ.get("WORLD_SIZE", 1))
