"""Causal self-attention with a head count, head dim, scale and window that are the layer's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.linears import column_linear, row_linear
from model.rotary import Table, rotate


class Attention(nn.Module):
    """Attention of one layer: q [d, A], k and v [d, kv width], o [A, d], with A = h_l * d_h(l).

    q, k, v and o are separate modules because q and k may need their own learning rate (arXiv 2605.10504).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.heads[layer]
        self.kv_heads = config.layer_kv_heads(layer)
        self.head_dim = config.layer_head_dim(layer)
        self.window = config.layer_window(layer)
        # None leaves 1/sqrt(d_h), this layer's own (arXiv 2606.27449, section 1), to SDPA.
        self.scale = 1.0 if config.attention_scale == "none" else None
        width, kv_width = config.attention_width(layer), config.kv_width(layer)
        bias = config.attention_bias == "all"
        self.q = column_linear(config.d_model, width, bias)
        self.k = column_linear(config.d_model, kv_width, bias)
        self.v = column_linear(config.d_model, kv_width, bias)
        self.o = row_linear(width, config.d_model, config.attention_bias != "none")

    def forward(self, hidden: Tensor, table: Table | None, mask: Tensor | None) -> Tensor:
        """Hidden [B, T, d] -> [B, T, d].

        table: the rotary table of this head dim, or None without rotary positions.
        mask: [T, T] bool, true where a query (row) sees a key (column), or None for plain causal attention.
        """
        batch, length = hidden.shape[:2]
        query = self.q(hidden).view(batch, length, self.heads, self.head_dim)  # [B, T, h, d_h]
        key = self.k(hidden).view(batch, length, self.kv_heads, self.head_dim)  # [B, T, kv, d_h]
        value = self.v(hidden).view(batch, length, self.kv_heads, self.head_dim)  # [B, T, kv, d_h]
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [B, h, T, d_h], as SDPA wants it
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.kv_heads != self.heads,
        )
        # [B, h, T, d_h] -> [B, T, A]
        return self.o(output.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))


def local_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask [length, length] of a causal window of *window* positions, the query's own included (GPT-Neo).

    None when the window hides nothing, so that SDPA can take its causal path without a mask (flash on GPUs).
    """
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]  # [query, key]
    return (distance >= 0) & (distance < window)
