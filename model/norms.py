"""RMSNorm and LayerNorm over the last dimension, with a weight and an optional bias, in fp32 inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.collectives import copy_to_ranks
from model.config import ModelConfig
from model.process_grid import ProcessGrid


class Norm(nn.Module):
    """Base of both norms: a weight [d] that starts at 1 and, optionally, a bias [d] that starts at 0."""

    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float, bias: bool, grid: ProcessGrid) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.grid = grid
        self.weight = nn.Parameter(torch.ones(width))
        if bias:
            self.bias = nn.Parameter(torch.zeros(width))
        else:
            self.register_parameter("bias", None)

    def parameters_in_use(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias; with sequence parallelism, their gradients are summed over the tensor ranks."""
        weight, bias = self.weight, self.bias
        if not self.grid.sequence_parallel:
            return weight, bias
        group = self.grid.tensor_group
        return copy_to_ranks(weight, group), None if bias is None else copy_to_ranks(bias, group)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight (+ bias): root mean square norm (arXiv 1910.07467, eq. 4)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], same dtype; torch computes bf16 inputs in fp32 and rounds once."""
        weight, bias = self.parameters_in_use()
        normed = F.rms_norm(hidden, (self.width,), weight, self.eps)
        return normed if bias is None else normed + bias


class HeadNorm(RMSNorm):
    """RMSNorm of single heads, [..., d_h]; ranks of a tensor group norm different heads with one weight."""

    def parameters_in_use(self) -> tuple[Tensor, Tensor | None]:
        """The weight, whose gradients are summed over the tensor ranks."""
        if self.grid.tensor_parallel == 1:
            return self.weight, None
        return copy_to_ranks(self.weight, self.grid.tensor_group), None


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight (+ bias): layer norm (arXiv 1607.06450)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], same dtype; torch computes bf16 inputs in fp32 and rounds once."""
        return F.layer_norm(hidden, (self.width,), *self.parameters_in_use(), self.eps)


def head_norm(config: ModelConfig, layer: int, grid: ProcessGrid) -> nn.Module | None:
    """The norm of a layer's query heads, or of its key heads; None where the config has none."""
    head_dim = config.layer_head_dim(layer)
    if config.qk_norm == "plain":
        return nn.RMSNorm(head_dim, config.norm_eps, elementwise_affine=False)
    return HeadNorm(head_dim, config.norm_eps, False, grid) if config.qk_norm == "weighted" else None


def build_norm(config: ModelConfig, width: int, grid: ProcessGrid) -> Norm:
    """The norm that the config asks for, over *width* coordinates."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(width, config.norm_eps, config.norm_bias, grid)
