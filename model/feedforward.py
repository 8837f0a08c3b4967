"""The feed-forward network of a block: gated (SwiGLU) or plain (MLP)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.linears import column_linear, enter_columns, fused_columns, row_linear
from model.process_grid import ProcessGrid

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda hidden: F.relu(hidden).square(),
}


class FeedForward(nn.Module):
    """swiglu: down(activation(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6); mlp: down(activation(up(x))).

    *fused_gate_up* multiplies by gate and up at once in training.
    """

    gate: nn.Module | None

    def __init__(
        self, config: ModelConfig, layer: int, grid: ProcessGrid, fused_gate_up: bool = False
    ) -> None:
        super().__init__()
        self.grid = grid
        self.fused_gate_up = fused_gate_up
        self.activation = _ACTIVATIONS[config.activation]
        d, width = config.layer_width(layer), config.layer_ffn_width(layer)
        if config.ffn == "swiglu":
            self.gate = column_linear(d, width, config.ffn_bias, grid)
        else:
            self.gate = None
        self.up = column_linear(d, width, config.ffn_bias, grid)
        self.down = row_linear(width, d, config.ffn_bias, grid)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        hidden = enter_columns(hidden, self.grid)
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        if self.fused_gate_up and self.training:
            gate, up = fused_columns(hidden, (self.gate, self.up))
        else:
            gate, up = self.gate(hidden), self.up(hidden)
        return self.down(self.activation(gate) * up)
