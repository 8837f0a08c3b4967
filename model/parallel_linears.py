"""megatron-core's tensor-parallel layers, with collectives that run on any backend. Imported at t > 1 only.

megatron-core's classes make the shards and mark them for DeepSpeed and Megatron tools
(``tensor_model_parallel``, ``partition_dim``). The forward passes are ours, because megatron's need CUDA for
some collectives and sum the gradients of q, k and v one by one: here one ``enter`` serves all three.

A hidden state outside these layers is [B, T, d] and equal on all ranks of the tensor group; with sequence
parallelism it is [B, T/t, d], each rank's part of the positions (arXiv 2205.05198, section 4.2.2), and the
all-reduces become all-gathers and reduce-scatters, which together move as many bytes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.collectives import copy_to_ranks, gather_sequence, sum_over_ranks, sum_scatter
from model.process_grid import ProcessGrid

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core lists the optional packages that are missing
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        set_tensor_model_parallel_attributes,
    )


def enter(hidden: Tensor, grid: ProcessGrid) -> Tensor:
    """Prepare a hidden state for column-parallel layers: all of [B, T, d], gathered if it was sharded."""
    if not grid.sequence_parallel:
        return copy_to_ranks(hidden, grid.tensor_group)
    return gather_sequence(hidden, grid.tensor_group)


def leave(partial: Tensor, grid: ProcessGrid) -> Tensor:
    """Sum the ranks' parts [B, T, d] of a row-parallel layer's output to a hidden state."""
    if not grid.sequence_parallel:
        return sum_over_ranks(partial, grid.tensor_group)
    parts = partial.unflatten(1, (grid.tensor_parallel, -1)).transpose(0, 1)  # [t, B, T/t, d]
    return sum_scatter(parts, grid.tensor_group)


def share_gradient(parameter: Tensor, grid: ProcessGrid) -> Tensor:
    """A replicated parameter, for use on hidden states: its gradient is made equal on all ranks.

    With whole hidden states it is equal already; with sequence parallelism each rank has only a part of the
    gradient.
    """
    return copy_to_ranks(parameter, grid.tensor_group) if grid.sequence_parallel else parameter


class ColumnLinear(ColumnParallelLinear):
    """Rows of the weight [out/t, in] and the bias [out/t]; whole inputs, a part of the outputs."""

    def __init__(self, in_features: int, out_features: int, bias: bool, grid: ProcessGrid) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            gather_output=False,
            **_common_arguments(grid),
        )
        _prepare(self, weight_dim=0, bias_sharded=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, in], which came through ``enter`` -> this rank's columns [B, T, out/t]."""
        return F.linear(hidden, self.weight, self.bias)


class RowLinear(RowParallelLinear):
    """Columns of the weight [out, in/t]; the bias [out] is whole on every rank and added once, after the
    sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, grid: ProcessGrid) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            **_common_arguments(grid),
        )
        self.grid = grid
        _prepare(self, weight_dim=1, bias_sharded=False)

    def forward(self, columns: Tensor) -> Tensor:
        """This rank's columns [B, T, in/t] -> hidden state [B, T, out] (a part of T with sequence
        parallelism)."""
        hidden = leave(F.linear(columns, self.weight), self.grid)
        return hidden if self.bias is None else hidden + share_gradient(self.bias, self.grid)


class TokenEmbedding(VocabParallelEmbedding):
    """Rows of the token embedding [rows/t, d]; also the LM head of tied models (see model.linears)."""

    def __init__(self, rows: int, d_model: int, grid: ProcessGrid) -> None:
        super().__init__(rows, d_model, **_common_arguments(grid))
        self.grid = grid
        _prepare(self, weight_dim=0, bias_sharded=False)

    def forward(self, input: Tensor, as_lm_head: bool = False) -> Tensor:
        """Token ids [B, T] -> hidden state; with as_lm_head, [B, T, d] from ``enter`` -> this rank's
        logits."""
        if as_lm_head:
            return F.linear(input, self.weight)  # [B, T, rows/t]
        local = input - self.vocab_start_index
        on_other_ranks = (local < 0) | (local >= self.num_embeddings_per_partition)
        vectors = F.embedding(local.masked_fill(on_other_ranks, 0), self.weight)
        return leave(vectors.masked_fill(on_other_ranks[..., None], 0), self.grid)


class PositionEmbedding(nn.Embedding):
    """The learned positions, whole on every rank, for hidden states that are sharded along T."""

    def __init__(self, context_length: int, d_model: int, grid: ProcessGrid) -> None:
        super().__init__(context_length, d_model)
        self.grid = grid

    def forward(self, input: Tensor) -> Tensor:
        """Positions [T] or [B, T] -> this rank's vectors [..., T / t, d]."""
        input = input.chunk(self.grid.tensor_parallel, dim=-1)[self.grid.tensor_rank]
        return F.embedding(input, share_gradient(self.weight, self.grid))


def _common_arguments(grid: ProcessGrid) -> dict[str, Any]:
    return {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=grid.tensor_parallel,
            # "CPU" means: allocate with plain torch.empty, which zero.Init and torch.device contexts can
            # redirect.
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            params_dtype=torch.get_default_dtype(),
        ),
        "init_method": nn.init.zeros_,
        "tp_group": grid.tensor_group,
    }


def _prepare(module: nn.Module, weight_dim: int, bias_sharded: bool) -> None:
    """Mark which parameters are shards, and keep megatron's ``_extra_state: None`` out of state dicts.

    Without the marks DeepSpeed leaves the shards of ranks > 0 out of the gradient norm; its universal
    checkpoint converter crashes on the extra entries.
    """
    set_tensor_model_parallel_attributes(module.weight, True, weight_dim, 1)
    bias = getattr(module, "bias", None)
    if bias_sharded and bias is not None and not hasattr(bias, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(bias, True, 0, 1)
    module.register_state_dict_post_hook(_drop_extra_state)


def _drop_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(f"{prefix}_extra_state", None)
