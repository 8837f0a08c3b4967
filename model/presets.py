"""Named model configs: those of the papers, their controls, and tiny ones for laptops and tests.

``python -m pretrain.presets`` lists them; with NAME and ``--plot heads.png`` it draws a schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig, block, divisors
from model.errors import UserError, closest
from model.heads import ascending, descending, parse_heads, shuffled, uniform

GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Scale:
    """One column of the Prism paper's table (arXiv 2606.27449, models and training)."""

    d_model: int
    """Width of the residual stream."""
    ffn_width: int
    """Gated feed-forward width, about 8/3 d; the paper's parameter counts imply it. 16 divides each."""
    uniform: str
    """The baseline's head schedule."""
    prism: str
    """The ascending head schedule."""


SCALES = {
    "124m": Scale(768, 2048, "12x12", "3x2,6x2,8x2,12x6"),
    "354m": Scale(1024, 2736, "16x24", "4x3,8x3,16x18"),
    "757m": Scale(1536, 4096, "16x24", "6x3,12x3,16x18"),
}

# The ablation at 124M, in the paper's order of gain; its eighth row is prism-124m.
ABLATION = {
    "config-1-124m": "3,6,8,12x9",
    "config-2-124m": "6x2,8x2,12x8",
    "config-3-124m": "4x2,8x2,12x8",
    "config-4-124m": "6x4,12x8",
    "config-5-124m": "2,4,6,8,12x8",
    "config-6-124m": "3x2,6x2,12x8",
    "prism-124m": SCALES["124m"].prism,
    "config-7-124m": "2x2,4x2,8x2,12x6",
}

# The head-progression note: 4 layers, rows by total head count (about 45, 90, 180).
PROGRESSIONS = {
    "45": ("3,6,12,24", "12x4"),
    "90": ("6,12,24,48", "24x4"),
    "180": ("12,24,48,96", "48x4"),
}

# arXiv 2605.10504 gives the sizes 270M and 0.7B, not the shapes; these are ours. Both widths make the gated
# feed-forward (8/3 d) exactly as large as the plain one (4 d), so the matched blocks differ in kind only.
MATCHED_270M = {"d_model": 960, "heads": uniform(15, 20)}
MATCHED_700M = {"d_model": 1536, "heads": uniform(24, 22)}
# The same comparison where a run takes a minute or two on two CPU cores: 1.5M parameters outside the
# embedding.
MINI_SIZES = {"vocab_size": 2048, "context_length": 128, "d_model": 144}
MATCHED_MINI: dict[str, Any] = {**MINI_SIZES, "heads": uniform(6, 6)}

TINY: dict[str, Any] = {"vocab_size": 4096, "context_length": 256, "d_model": 192}
TINY_PRISM = parse_heads("3,6x2,12x3")
MICRO: dict[str, Any] = {"vocab_size": 2048, "context_length": 256, "d_model": 128}
MICRO_PRISM = parse_heads("2,4,8x2")
NANO: dict[str, Any] = {"vocab_size": 260, "context_length": 64, "d_model": 48}


def _scale_presets() -> dict[str, ModelConfig]:
    """Schedules of arXiv 2606.27449 and their controls: llama block, tied (the norm is our choice)."""

    def build(size: str, heads: Sequence[int]) -> ModelConfig:
        scale = SCALES[size]
        return block(
            "llama",
            vocab_size=GPT2_VOCABULARY,
            context_length=1024,
            d_model=scale.d_model,
            ffn_width=scale.ffn_width,
            heads=heads,
        )

    presets = {}
    for kind in ("uniform", "prism"):
        for size, scale in SCALES.items():
            presets[f"{kind}-{size}"] = build(size, parse_heads(getattr(scale, kind)))
    presets.update({name: build("124m", parse_heads(heads)) for name, heads in ABLATION.items()})
    # The controls that the paper leaves out: the same multiset in other orders, and a uniform schedule whose
    # number of heads is, of those that divide d_model, the closest to the ascending one's mean: 8 for 8.83 at
    # 124m. At the larger scales (13.5 and 14.25) that is the paper's own baseline of 16.
    for size, scale in SCALES.items():
        multiset = parse_heads(scale.prism)
        mean = sum(multiset) / len(multiset)
        closest_to_mean = min(divisors(scale.d_model), key=lambda heads: abs(heads - mean))
        presets[f"descending-{size}"] = build(size, descending(multiset))
        presets[f"shuffled-{size}"] = build(size, shuffled(multiset, seed=0))
        if uniform(closest_to_mean, len(multiset)) != parse_heads(scale.uniform):
            presets[f"uniform-{closest_to_mean}-{size}"] = build(
                size, uniform(closest_to_mean, len(multiset))
            )
    return presets


def _matched_presets() -> dict[str, ModelConfig]:
    """GPT-2 and LLaMA blocks of the same size, and all sixteen mixtures between them (arXiv 2605.10504)."""

    def build(kind: str, shape: dict[str, Any], **switches: Any) -> ModelConfig:
        ffn_kind = {"gpt2": "mlp", "llama": "swiglu"}[kind] if "ffn" not in switches else switches["ffn"]
        d_model = shape["d_model"]
        ffn_width = d_model * 8 // 3 if ffn_kind == "swiglu" else 4 * d_model
        sizes = {"vocab_size": GPT2_VOCABULARY, "context_length": 1024, "ffn_width": ffn_width}
        return block(kind, **{**sizes, **shape, **switches})

    presets = {
        "gpt2-270m": build("gpt2", MATCHED_270M),
        "llama-270m": build("llama", MATCHED_270M),
        "gpt2-700m": build("gpt2", MATCHED_700M),
        "llama-700m": build("llama", MATCHED_700M),
        "gpt2-mini": build("gpt2", MATCHED_MINI),
        "llama-mini": build("llama", MATCHED_MINI),
    }
    sizes = {"270m": MATCHED_270M, "700m": MATCHED_700M, "mini": MATCHED_MINI}
    for size, norm, bias, ffn, positions in itertools.product(
        sizes, ("layernorm", "rmsnorm"), ("bias", "nobias"), ("mlp", "swiglu"), ("learned", "rope")
    ):
        presets[f"matched-{norm}-{bias}-{ffn}-{positions}-{size}"] = build(
            "gpt2",
            sizes[size],
            norm=norm,
            norm_bias=bias == "bias",
            attention_bias="all" if bias == "bias" else "none",
            ffn_bias=bias == "bias",
            ffn=ffn,
            activation="gelu_tanh" if ffn == "mlp" else "silu",
            positions=positions,
        )
    return presets


def _progression_presets() -> dict[str, ModelConfig]:
    """The nine rows of the head-progression note, as published (no attention scale) and with 1/sqrt(d_h)."""
    presets = {}
    for total, (rising, constant) in PROGRESSIONS.items():
        rows = {
            "ascending": ascending(parse_heads(rising)),
            "constant": parse_heads(constant),
            "descending": descending(parse_heads(rising)),
        }
        for order, heads in rows.items():
            config = block(
                "gptneo",
                vocab_size=GPT2_VOCABULARY,
                context_length=2048,
                d_model=768,
                ffn_width=3072,
                heads=heads,
            )
            presets[f"headprog-{order}-{total}"] = config
            presets[f"headprog-{order}-{total}-scaled"] = config.replace(attention_scale="sqrt_head_dim")
    return presets


def _tiny_presets() -> dict[str, ModelConfig]:
    """Small enough to train on two CPU cores (tiny, and micro: prism-micro is the default run) or in a test
    (nano).

    The vocabulary sizes are placeholders; a run replaces them by its tokenizer's.
    """
    schedules = {
        "prism-tiny": TINY_PRISM,
        "uniform-tiny": uniform(12, 6),
        "descending-tiny": descending(TINY_PRISM),
        "shuffled-tiny": shuffled(TINY_PRISM, seed=0),
    }
    presets = {name: block("llama", **TINY, ffn_width=512, heads=heads) for name, heads in schedules.items()}
    micro = {
        "prism-micro": MICRO_PRISM,
        "uniform-micro": uniform(8, 4),
        "descending-micro": descending(MICRO_PRISM),
    }
    presets |= {name: block("llama", **MICRO, ffn_width=384, heads=heads) for name, heads in micro.items()}
    windows = [64 if layer % 2 else None for layer in range(6)]
    presets["gpt2-tiny"] = block("gpt2", **TINY, ffn_width=768, heads=uniform(12, 6))
    presets["gptneo-tiny"] = block(
        "gptneo", **TINY, ffn_width=768, heads=uniform(12, 6), local_window=windows
    )
    presets["prism-nano"] = block("llama", **NANO, ffn_width=128, heads=(2, 3, 4, 4))
    presets["gpt2-nano"] = block("gpt2", **NANO, ffn_width=192, heads=uniform(4, 4))
    return presets


_PRESETS = {**_scale_presets(), **_matched_presets(), **_progression_presets(), **_tiny_presets()}


def preset_names() -> list[str]:
    """Every preset's name, in the order of the listing."""
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The config of that name; raises UserError, naming the closest one, if there is none."""
    if name not in _PRESETS:
        hint = closest(name, _PRESETS) or "; `python -m pretrain.presets` lists them"
        raise UserError(f"model: no preset {name!r}{hint}")
    return _PRESETS[name]
