"""Zero-pads layers of different shapes to one shape, so that plain LlamaForCausalLM or Qwen3ForCausalLM holds
the model.

Added heads have zero rows in o, so they change nothing; added columns of a head stand at rotary frequencies
that its own pairs do not have. A Qwen3's heads have no such columns, over which its norms would be taken.
Added columns of a feed-forward network are zero on both sides, and an absent part is all zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError


@dataclass(frozen=True)
class Padding:
    """The uniform shape into which every layer fits."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def choose_padding(model: ModelConfig) -> Padding:
    """The smallest uniform heads, key/value heads, head dim and feed-forward width that hold every layer of
    *model*.

    Head dim: the least common multiple, because rotary frequency 2j/d_h must be one of 2i/D. Llama's
    configuration requires that heads divide d_model.

    Raises:
        UserError: no such shape exists.
    """
    layers, width = model.attention_layers, max(model.ffn_widths) or 1
    if not layers:
        return Padding(1, 1, 2, width)
    # rotary pairs: D/2 must hold j * D/d_h, which it does for any common multiple of even head dims
    head_dim = math.lcm(*(model.layer_head_dim(layer) for layer in layers))
    group = max(model.heads[layer] // model.layer_kv_heads(layer) for layer in layers)
    needed = max(model.layer_kv_heads(layer) for layer in layers)
    if model.qk_norm != "none":  # a Qwen3
        return Padding(needed * group, needed, head_dim, width)
    for kv_heads in range(needed, model.d_model // group + 1):
        if model.d_model % (kv_heads * group) == 0:
            return Padding(kv_heads * group, kv_heads, head_dim, width)
    raise UserError(
        f"format: 'llama' needs a head count of at least {needed * group} that divides d_model "
        f"{model.d_model} and is a multiple of {group}; there is none; valid: native"
    )


def padded_model(model: ModelConfig) -> ModelConfig:
    """The uniform model that holds *model* when its parameters are padded."""
    padding, layers = choose_padding(model), model.num_layers
    return model.replace(
        heads=(padding.heads,) * layers,
        kv_heads=(padding.kv_heads,) * layers,
        head_dim=(padding.head_dim,) * layers,
        ffn_width=padding.ffn_width,
    )


def pad_parameter(model: ModelConfig, name: str, value: Tensor) -> Tensor:
    """Our parameter *name* in the shape of choose_padding."""
    parts, padding = name.split("."), choose_padding(model)
    if parts[0] != "layers" or parts[2].endswith("_norm") or name.endswith((".o.bias", "_norm.weight")):
        return value
    layer, part = int(parts[1]), parts[3]
    if parts[2] == "ffn":
        if part == "down":
            added = padding.ffn_width - value.shape[1] if value.ndim == 2 else 0
            return F.pad(value, (0, added)) if added else value
        return F.pad(value, (0, 0) * (value.ndim - 1) + (0, padding.ffn_width - len(value)))
    heads, kv_heads, head_dim = model.heads[layer], model.layer_kv_heads(layer), model.layer_head_dim(layer)
    if (heads, kv_heads, head_dim) == (padding.heads, padding.kv_heads, padding.head_dim):
        return value
    if part in "kv":
        head_places, padded_heads = torch.arange(kv_heads), padding.kv_heads
    else:  # the j-th query head of key/value head k
        layer_group = torch.arange(heads // kv_heads)
        head_places = (torch.arange(kv_heads)[:, None] * padding.group + layer_group).flatten()
        padded_heads = padding.heads
    if part in "qk":  # pair j of d_h turns by 2j/d_h: the padded pair with that frequency is j * D/d_h
        first = torch.arange(head_dim // 2) * (padding.head_dim // head_dim)
        columns = torch.cat([first, first + padding.head_dim // 2])
    else:
        columns = torch.arange(head_dim)
    places = (head_places[:, None] * padding.head_dim + columns).flatten()  # [h * d_h]
    # Llama divides the logits by sqrt(D), not by the layer's own sqrt(d_h).
    scale = math.sqrt(padding.head_dim / head_dim) if part == "q" else 1.0
    dim = 1 if part == "o" else 0
    shape = list(value.shape)
    shape[dim] = padded_heads * padding.head_dim
    return value.new_zeros(shape).index_copy_(dim, places, value * scale)
