"""Kinds of blocks: the switches of GPT-2, LLaMA, Qwen2, Qwen3 and GPT-Neo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.config import ModelConfig
from model.errors import UserError, suggest
from model.heads import parse_heads

GPT2: dict[str, Any] = {
    "ffn": "mlp",
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "norm_bias": True,
    "attention_bias": "all",
    "ffn_bias": True,
    "positions": "learned",
}
BLOCKS: dict[str, dict[str, Any]] = {
    # GPT-2 (Radford et al. 2019), as in transformers' GPT2LMHeadModel.
    "gpt2": GPT2,
    # LLaMA (arXiv 2302.13971): the defaults; the original does not tie embeddings, the Prism presets do.
    "llama": {},
    # Qwen2 (arXiv 2407.10671), as in transformers' Qwen2ForCausalLM.
    "qwen2": {"attention_bias": "qkv"},
    # Qwen3 (arXiv 2505.09388), as in transformers' Qwen3ForCausalLM.
    "qwen3": {"qk_norm": "weighted"},
    # GPT-Neo, as in transformers: no scale, bias on the output projection; block() alternates windows.
    "gptneo": GPT2 | {"attention_bias": "output", "attention_scale": "none"},
}
"""Switches that make a block kind, where they are not ModelConfig's defaults; sizes and heads stay free."""

GPTNEO_WINDOW = 256


def block(name: str, **fields: Any) -> ModelConfig:
    """A config with the switches of a block kind (gpt2, llama, qwen2, qwen3, gptneo); *fields* set the rest
    and override them.

    gptneo alternates global layers and layers with a window of 256, the first one global.
    Raises UserError for an unknown kind, unknown or missing fields, and values that are not valid.
    """
    if name not in BLOCKS:
        raise UserError(
            f"block: {name!r} is unknown; it must be one of {', '.join(BLOCKS)}{suggest(name, BLOCKS)}"
        )
    values = {**BLOCKS[name], **fields}
    heads = values.get("heads")
    if name == "gptneo" and "local_window" not in fields and isinstance(heads, Sequence):
        num_layers = len(parse_heads(heads) if isinstance(heads, str) else heads)
        values["local_window"] = tuple(GPTNEO_WINDOW if layer % 2 else None for layer in range(num_layers))
    return ModelConfig.from_json(values)
