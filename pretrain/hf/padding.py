"""Pads layers of different shapes to one shape, so that plain LlamaForCausalLM or Qwen3ForCausalLM holds the
model.

Added heads have zero rows in o, so they change nothing. Added columns of a head stand at rotary frequencies
that its pairs do not have: in a Llama they are zero; in a Qwen3, whose norms take the mean over a head's
columns, they are copies of its other columns, which leave the mean as it is, with norm weights of zero. The
layer's factor on the logits is in q, or in the weights of its norm. Added columns of a feed-forward network
are zero on both sides, and an absent part is all zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.schedules import at_layer


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


def choose_padding(model: ModelConfig, chosen: str) -> Padding:
    """The smallest uniform heads, key/value heads, head dim and feed-forward width that hold every layer of
    *model* in the format *chosen*.

    Head dim: the least common multiple, because rotary frequency 2j/d_h must be one of 2i/D. Of the formats,
    Llama's configuration alone requires that heads divide d_model.

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
    if chosen != "llama":
        return Padding(needed * group, needed, head_dim, width)
    for kv_heads in range(needed, model.d_model // group + 1):
        if model.d_model % (kv_heads * group) == 0:
            return Padding(kv_heads * group, kv_heads, head_dim, width)
    raise UserError(
        f"format: 'llama' needs a head count of at least {needed * group} that divides d_model "
        f"{model.d_model} and is a multiple of {group}; there is none; valid: native"
    )


def folded_model(model: ModelConfig) -> ModelConfig:
    """The model whose weights hold the divisor of the logits."""
    return model.replace(parametrization="standard", base_width=None)


def scaled_model(model: ModelConfig) -> ModelConfig:
    """The model of a Llama or Qwen3, whose weights also hold the factors of the attention logits."""
    return folded_model(model).replace(
        attention_scale="sqrt_head_dim",
        attention_scale_base=None,
        qk_norm="none" if model.qk_norm == "none" else "weighted",
    )


def padded_model(model: ModelConfig, chosen: str) -> ModelConfig:
    """The uniform model that holds *model* in the format when its parameters are padded."""
    padding, layers = choose_padding(model, chosen), model.num_layers
    bases = {at_layer(model.rope_base, layer) for layer in model.attention_layers}
    return scaled_model(model).replace(
        heads=(padding.heads,) * layers,
        kv_heads=(padding.kv_heads,) * layers,
        head_dim=(padding.head_dim,) * layers,
        ffn_width=padding.ffn_width,
        # Layers without attention may have had others.
        rotary_share=1.0,
        rope_base=bases.pop() if len(bases) == 1 else model.rope_base,
    )


def pad_parameter(model: ModelConfig, chosen: str, name: str, value: Tensor) -> Tensor:
    """Our parameter *name* in the shape of choose_padding; of queries and keys without norm weights, these
    are ones."""
    parts, padding = name.split("."), choose_padding(model, chosen)
    if parts[0] != "layers" or parts[2].endswith("_norm") or name.endswith(".o.bias"):
        return value
    layer, part = int(parts[1]), parts[3]
    if parts[2] == "ffn":
        if part == "down":
            added = padding.ffn_width - value.shape[1] if value.ndim == 2 else 0
            return F.pad(value, (0, added)) if added else value
        return F.pad(value, (0, 0) * (value.ndim - 1) + (0, padding.ffn_width - len(value)))
    heads, kv_heads, head_dim = model.heads[layer], model.layer_kv_heads(layer), model.layer_head_dim(layer)
    ratio = padding.head_dim // head_dim
    # Their logits are divided by sqrt(D), ours multiplied by the layer's own factor.
    factor = model.layer_scale(layer)
    scale = math.sqrt(padding.head_dim) * factor if factor is not None else math.sqrt(ratio)
    # Pair j of d_h turns by 2j/d_h: the padded pair with that frequency is j * D/d_h.
    first = torch.arange(head_dim // 2) * ratio
    pairs = torch.cat([first, first + padding.head_dim // 2])
    if part.endswith("_norm"):
        return value.new_zeros(padding.head_dim).index_copy_(
            0, pairs, value * scale if part == "q_norm" else value
        )
    if part == "q" and model.qk_norm == "none" and scale != 1:
        value = value * scale
    if (heads, kv_heads, head_dim) == (padding.heads, padding.kv_heads, padding.head_dim):
        return value
    columns = pairs if part in "qk" else torch.arange(head_dim)
    if part in "qk" and model.qk_norm != "none":
        columns = torch.arange(padding.head_dim)
        halves = value.unflatten(0, (-1, 2, head_dim // 2))  # [h, 2, d_h / 2, ...]
        value = halves.repeat_interleave(ratio, 2).flatten(0, 2)
    if part in "kv":
        head_places, padded_heads = torch.arange(kv_heads), padding.kv_heads
    else:  # the j-th query head of key/value head k
        layer_group = torch.arange(heads // kv_heads)
        head_places = (torch.arange(kv_heads)[:, None] * padding.group + layer_group).flatten()
        padded_heads = padding.heads
    places = (head_places[:, None] * padding.head_dim + columns).flatten()  # [h * d_h], or [h * D]
    dim = 1 if part == "o" else 0
    shape = list(value.shape)
    shape[dim] = padded_heads * padding.head_dim
    return value.new_zeros(shape).index_copy_(dim, places, value)
