"""Presents the process grid to DeepSpeed as an "mpu", under the method names that it calls."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from model.process_grid import ProcessGrid


class ModelParallelUnit:
    """A process grid with the methods that DeepSpeed calls on an ``mpu``.

    It has no ``initialize_sequence_parallel`` on purpose: DeepSpeed takes an mpu that has it for Ulysses
    sequence parallelism, and ignores its groups.
    """

    def __init__(self, grid: ProcessGrid) -> None:
        self._grid = grid

    def get_tensor_model_parallel_rank(self) -> int:
        """Index of this rank's part of every sharded parameter."""
        return self._grid.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """The tensor-parallel degree t."""
        return self._grid.tensor_parallel

    def get_tensor_model_parallel_group(self) -> Any:
        """The ranks that share one copy of the model."""
        return self._grid.tensor_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the tensor group's first member."""
        return dist.get_global_rank(self._grid.tensor_group, 0)

    def get_data_parallel_rank(self) -> int:
        """Index of the copy of the model that this rank is part of."""
        return self._grid.data_rank

    def get_data_parallel_world_size(self) -> int:
        """Number of copies of the model."""
        return self._grid.data_parallel

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same part of the model."""
        return self._grid.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return dist.get_process_group_ranks(self._grid.data_group)

    # Without pipelines, model parallelism is tensor parallelism.
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group


def deepspeed_mpu(grid: ProcessGrid) -> ModelParallelUnit | None:
    """Build the ``mpu`` argument of deepspeed.initialize; None at t = 1, where DeepSpeed needs none."""
    return ModelParallelUnit(grid) if grid.tensor_parallel > 1 else None
