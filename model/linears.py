"""Factories for the layers that hold matrices: the one place that decides which classes they are.

Every matrix of the network is a column-parallel linear (its outputs can be split over ranks), a row-parallel
linear (its inputs can) or the token embedding; the callers name which, and these functions build it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Token embedding that can also serve as the output head, so that tied models call one module twice.

    The head goes through this module's own forward, not through its weight from outside: under ZeRO-3 a
    weight is whole only while the module that owns it runs. (DeepSpeed 0.19 patches attribute access to catch
    other uses; this way nothing depends on that.)
    """

    def forward(self, input: Tensor, as_output: bool = False) -> Tensor:
        """Token ids [B, T] -> vectors [B, T, d]; with as_output, vectors [B, T, d] -> logits [B, T, rows]."""
        if as_output:
            return F.linear(input, self.weight)
        return super().forward(input)


def column_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """A linear layer whose outputs split into equal contiguous parts: q, k, v, gate, up, output."""
    return nn.Linear(in_features, out_features, bias=bias)


def row_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """A linear layer whose inputs are the columns of such layers: o, down."""
    return nn.Linear(in_features, out_features, bias=bias)


def token_embedding(rows: int, d_model: int) -> TokenEmbedding:
    """The token embedding, *rows* being the padded vocabulary."""
    return TokenEmbedding(rows, d_model)


def position_embedding(context_length: int, d_model: int) -> nn.Embedding:
    """The learned position embedding; every rank needs all of it."""
    return nn.Embedding(context_length, d_model)


def is_linear(module: nn.Module) -> bool:
    """Whether the module came from column_linear or row_linear."""
    return isinstance(module, nn.Linear)


def is_embedding(module: nn.Module) -> bool:
    """Whether the module came from token_embedding or position_embedding."""
    return isinstance(module, nn.Embedding)
