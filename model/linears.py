"""Factories for the layers that hold matrices: the only place that chooses their classes.

Every matrix of the network is a column-parallel linear (its outputs can be split over ranks), a row-parallel
linear (its inputs can) or the token embedding; the callers name which, and these functions build it: torch's
own classes at t = 1, megatron-core's parallel ones, with the same parameter names, on a process grid with t >
1. megatron-core is imported only then. The grid has no default: a layer without one would be whole in a
sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.process_grid import ProcessGrid

LMHeadLoss = Callable[[Tensor, Tensor], Tensor]
"""Hidden state [B, T, d] and the LM head's weight [rows, d] -> the loss, computed while the weight is
whole."""


class Embedding(nn.Embedding):
    """torch's, without values on the meta device: drawing them would load torch's compiler, for seconds."""

    def reset_parameters(self) -> None:
        """Draw values, if they exist."""
        if not self.weight.is_meta:
            super().reset_parameters()


class TokenEmbedding(Embedding):
    """Token embedding that can also serve as the LM head, so that tied models call one module twice.

    The head goes through this module's own forward, not through its weight from outside: under ZeRO-3 a
    weight is whole only while the module that owns it runs. (DeepSpeed 0.19 patches attribute access to catch
    other uses; this way nothing depends on that.)
    """

    def forward(self, input: Tensor, as_lm_head: bool = False, loss: LMHeadLoss | None = None) -> Tensor:
        """Token ids [B, T] -> vectors [B, T, d]; with as_lm_head, vectors [B, T, d] -> logits [B, T, rows].

        With loss, vectors [B, T, d] -> what loss makes of them and the weight.
        """
        if loss is not None:
            return loss(input, self.weight)
        if as_lm_head:
            return F.linear(input, self.weight)
        return super().forward(input)


class LMHead(nn.Linear):
    """The LM head of models that are not tied."""

    def forward(self, input: Tensor, loss: LMHeadLoss | None = None) -> Tensor:
        """Vectors [B, T, d] -> logits [B, T, rows]; with loss, what it makes of them and the weight."""
        return super().forward(input) if loss is None else loss(input, self.weight)


def column_linear(in_features: int, out_features: int, bias: bool, grid: ProcessGrid) -> nn.Module:
    """A linear layer whose outputs split into equal contiguous parts: q, k, v, gate, up, output.

    Its input must have come through enter_columns, once for all layers that share it.
    """
    if grid.tensor_parallel > 1:
        from model.parallel_linears import ColumnLinear

        return ColumnLinear(in_features, out_features, bias, grid)
    return nn.Linear(in_features, out_features, bias=bias)


def row_linear(in_features: int, out_features: int, bias: bool, grid: ProcessGrid) -> nn.Module:
    """A linear layer whose inputs are the outputs of column_linear layers: o, down."""
    if grid.tensor_parallel > 1:
        from model.parallel_linears import RowLinear

        return RowLinear(in_features, out_features, bias, grid)
    return nn.Linear(in_features, out_features, bias=bias)


def lm_head(d_model: int, rows: int, grid: ProcessGrid) -> nn.Module:
    """The LM head of a model that is not tied, *rows* being the padded vocabulary: a column_linear at t >
    1."""
    if grid.tensor_parallel > 1:
        return column_linear(d_model, rows, bias=False, grid=grid)
    return LMHead(d_model, rows, bias=False)


def token_embedding(rows: int, d_model: int, grid: ProcessGrid) -> nn.Module:
    """The token embedding, *rows* being the padded vocabulary."""
    if grid.tensor_parallel > 1:
        from model import parallel_linears

        return parallel_linears.TokenEmbedding(rows, d_model, grid)
    return TokenEmbedding(rows, d_model)


def position_embedding(context_length: int, d_model: int, grid: ProcessGrid) -> nn.Embedding:
    """The learned position embedding; every rank needs all of it."""
    if grid.sequence_parallel:
        from model.parallel_linears import PositionEmbedding

        return PositionEmbedding(context_length, d_model, grid)
    return Embedding(context_length, d_model)


def enter_columns(hidden: Tensor, grid: ProcessGrid) -> Tensor:
    """Prepare a hidden state [B, T, d] for column-parallel layers: its gradient is summed over the ranks."""
    if grid.tensor_parallel > 1:
        from model.parallel_linears import enter

        return enter(hidden, grid)
    return hidden


def fused_columns(hidden: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of several column_linear layers of one input [B, T, d], as views of one product.

    The layers keep their parameters. Not at ZeRO stage 3, which needs each layer's own forward pass (see
    above).
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
    sizes = [len(weight) for weight in weights]  # type: ignore[arg-type]
    return F.linear(hidden, torch.cat(weights), bias).split(sizes, dim=-1)  # type: ignore[arg-type]


def shard_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which the tensor group's ranks hold equal parts of a parameter; None if each has it
    all."""
    if getattr(parameter, "tensor_model_parallel", False):
        return int(parameter.partition_dim)  # type: ignore[attr-defined]
    return None
