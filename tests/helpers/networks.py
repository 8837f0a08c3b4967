"""Small networks of every block kind and schedule, and their transformers counterparts."""

from __future__ import annotations

from typing import Any

import torch

from model.blocks import block
from model.config import ModelConfig
from model.initialization import initialize
from model.parameters import has_vocabulary_rows
from model.transformer import Transformer

SIZES: dict[str, Any] = {"vocab_size": 260, "context_length": 64, "d_model": 48}
LLAMA: dict[str, Any] = {**SIZES, "ffn_width": 128}
PLAIN: dict[str, Any] = {**SIZES, "ffn_width": 192}

CONFIGS: dict[str, ModelConfig] = {
    "uniform": block("llama", **LLAMA, heads=(4, 4, 4)),
    "prism": block("llama", **LLAMA, heads=(2, 3, 4, 4)),
    "ablation": block("llama", **LLAMA, heads=(1, 2, 4, 6), tie_embeddings=False),
    "descending": block("llama", **LLAMA, heads=(6, 4, 3, 2)),
    "grouped": block("llama", **LLAMA, heads=(4, 4, 8), kv_heads=(2, 4, 2)),
    "head_dim": block("llama", **LLAMA, heads=(2, 3, 4), head_dim=(8, 8, 16)),
    "qwen3": block(
        "qwen3", **LLAMA, heads=(6,) * 3, kv_heads=(3,) * 3, head_dim=(16,) * 3, local_window=(None, 16, 16)
    ),
    "qwen3_padded": block(
        "qwen3", **LLAMA, heads=(2, 5, 4), kv_heads=(1, 5, 2), head_dim=(8,) * 3, attention_bias="all"
    ),
    "gpt2": block("gpt2", **PLAIN, heads=(4, 4)),
    "gpt2_prism": block("gpt2", **PLAIN, heads=(2, 3, 4)),
    "gptneo": block("gptneo", **PLAIN, heads=(4, 4, 4), local_window=(None, 16, None)),
    "gptneo_windows": block("gptneo", **PLAIN, heads=(2, 3, 4), local_window=(None, 16, 5)),
    "biases": block(
        "llama", **LLAMA, heads=(2, 3), norm_bias=True, attention_bias="all", ffn_bias=True, activation="gelu"
    ),
    "modern": block(
        "llama",
        **LLAMA,
        heads=(2, 3, 4),
        qk_norm="weighted",
        attention_scale="head_dim",
        attention_scale_base=8,
        logit_softcap=4.0,
        parametrization="mup",
        base_width=32,
        activation="relu2",
        rope_scaling={"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_context_length": 16},
    ),
    "plain_norm": block(
        "llama", **LLAMA, heads=(2, 3), qk_norm="plain", attention_scale="constant", attention_scale_base=16
    ),
    "head_gate": block("llama", **LLAMA, heads=(2, 3, 4), kv_heads=(1, 3, 2), attention_gate="head"),
    "element_gate": block("gpt2", **PLAIN, heads=(2, 0, 3), attention_gate="element"),
    "positions": block(
        "llama",
        **LLAMA,
        heads=(2, 3, 4, 2),
        rope_base=(100.0, None, 10000.0, 100.0),
        rotary_share=(0.5, 1.0, 1.0, 1.0),
    ),
    "tapered": block("llama", **SIZES, ffn_width=(192, 128, 64), heads=(2, 3, 4)),
    "absent": block("llama", **SIZES, ffn_width=(96, 0, 128, 64), heads=(0, 3, 4, 0), kv_heads=(0, 1, 4, 0)),
    "absent_gpt2": block(
        "gpt2", **SIZES, ffn_width=(0, 192, 64), heads=(2, 0, 3), local_window=(9, None, None)
    ),
    "cross": block(
        "llama",
        **SIZES,
        heads=(4, 3, 2, 0),
        kv_heads=(2, 1, 2, 0),
        block_width=(80, 24, 48, 64),
        ffn_width=96,
    ),
    "waist": block("gpt2", **PLAIN, heads=(2, 3, 4), block_width=(48, 12, 40), attention_gate="head"),
    "no_bias": block("gpt2", **PLAIN, heads=(2, 3), norm_bias=False, attention_bias="none", ffn_bias=False),
}


def network(chosen: str | ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """The network of a config (or of one above) with weights far from their start, so that every switch
    shows."""
    config = CONFIGS[chosen] if isinstance(chosen, str) else chosen
    result = Transformer(config)
    initialize(result, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0, 0.05, generator=generator)
            if has_vocabulary_rows(name):
                noise[config.vocab_size :] = 0
            parameter.add_(noise)
    return result.to(dtype).eval().requires_grad_(False)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(2, 260, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return float((theirs.double() - ours.double()).abs().max() / ours.double().abs().max())
