"""Named model configs: those of the papers, their controls, and tiny ones for laptops and tests.

``head-schedules presets`` lists them; with NAME and ``--plot heads.png`` it draws a schedule.
"""

from __future__ import annotations

import itertools
from typing import Any

from model.allocations import variable_widths
from model.blocks import block
from model.config import ModelConfig
from model.errors import UserError, quote, suggest
from model.heads import make_uniform, parse_heads, shuffle, sort_ascending, sort_descending

GPT2_VOCABULARY = 50257


# The Prism paper's table (arXiv 2606.27449, models and training). The feed-forward width is about 8/3 d; the
# paper's parameter counts imply it. 16 divides each.
SCALES = {
    "124m": {"d_model": 768, "ffn_width": 2048},
    "354m": {"d_model": 1024, "ffn_width": 2736},
    "757m": {"d_model": 1536, "ffn_width": 4096},
}
SCHEDULES = {
    "uniform-124m": "12x12",
    "uniform-354m": "16x24",
    "uniform-757m": "16x24",
    "prism-124m": "3x2,6x2,8x2,12x6",
    "prism-354m": "4x3,8x3,16x18",
    "prism-757m": "6x3,12x3,16x18",
    # The ablation at 124M, in the paper's order of gain; prism-124m comes before the last.
    "config-1-124m": "3,6,8,12x9",
    "config-2-124m": "6x2,8x2,12x8",
    "config-3-124m": "4x2,8x2,12x8",
    "config-4-124m": "6x4,12x8",
    "config-5-124m": "2,4,6,8,12x8",
    "config-6-124m": "3x2,6x2,12x8",
    "config-7-124m": "2x2,4x2,8x2,12x6",
    # Of the head counts that divide d_model the closest to prism-124m's mean, 8.83. At the larger scales
    # (13.5 and 14.25) that is the paper's own baseline of 16.
    "uniform-8-124m": "8x12",
}

# The head-progression note: 4 layers, rows by total head count (about 45, 90, 180).
PROGRESSIONS = {
    "45": ("3,6,12,24", "12x4"),
    "90": ("6,12,24,48", "24x4"),
    "180": ("12,24,48,96", "48x4"),
}

# arXiv 2605.10504 gives the sizes 270M and 0.7B, not the shapes; these are ours. Both widths make the gated
# feed-forward (8/3 d) exactly as large as the plain one (4 d), so the matched blocks differ in kind only.
MATCHED: dict[str, dict[str, Any]] = {
    "270m": {"d_model": 960, "heads": make_uniform(15, 20)},
    "700m": {"d_model": 1536, "heads": make_uniform(24, 22)},
    # The same comparison where a run takes a minute or two on two CPU cores: 1.5M parameters outside the
    # embedding.
    "mini": {"vocab_size": 2048, "context_length": 128, "d_model": 144, "heads": make_uniform(6, 6)},
}

# OpenELM (arXiv 2404.14619): d_model, layers and head dim. Attention grows from 0.5 to 1 times d_model, the
# feed-forward networks from 0.5 to 4 times, with four query heads to a key/value head (apple/corenet).
OPENELM = {"270m": (1280, 16, 64), "450m": (1536, 20, 64), "1.1b": (2048, 28, 64), "3b": (3072, 36, 128)}

# Variable-Width Transformers (arXiv 2606.18246): d_model and layers. Sixteen heads in every layer, gated
# feed-forward networks of 4 w, a context of 4,096 tokens and cl100k_base are the paper's. Our choice is an LM
# head that is not tied, which comes closer to the sizes in the models' names.
VARIABLE = {"200m": (640, 16), "500m": (960, 24), "1b": (1280, 32), "2b": (1600, 40)}

TINY: dict[str, Any] = {"vocab_size": 4096, "context_length": 256, "d_model": 192}
TINY_PRISM = parse_heads("3,6x2,12x3")
MICRO: dict[str, Any] = {"vocab_size": 2048, "context_length": 256, "d_model": 128}
MICRO_PRISM = parse_heads("2,4,8x2")
NANO: dict[str, Any] = {"vocab_size": 260, "context_length": 64, "d_model": 48}


def _scale_presets() -> dict[str, ModelConfig]:
    """Schedules of arXiv 2606.27449 and their controls: llama block, tied (the norm is our choice)."""
    schedules = {name: parse_heads(heads) for name, heads in SCHEDULES.items()}
    for size in SCALES:  # controls that the paper leaves out: the same multiset in other orders
        multiset = schedules[f"prism-{size}"]
        schedules[f"descending-{size}"] = sort_descending(multiset)
        schedules[f"shuffled-{size}"] = shuffle(multiset, seed=0)
    sizes = {"vocab_size": GPT2_VOCABULARY, "context_length": 1024}
    return {
        name: block("llama", **sizes, **SCALES[name.rpartition("-")[2]], heads=heads)
        for name, heads in schedules.items()
    }


def _matched_presets() -> dict[str, ModelConfig]:
    """GPT-2 and LLaMA blocks of the same size, and all sixteen mixtures between them (arXiv 2605.10504)."""

    def build(kind: str, size: str, ffn: str, **switches: Any) -> ModelConfig:
        shape = MATCHED[size]
        d_model = shape["d_model"]
        sizes = {"vocab_size": GPT2_VOCABULARY, "context_length": 1024, **shape}
        ffn_width = d_model * 8 // 3 if ffn == "swiglu" else 4 * d_model
        return block(kind, **sizes, ffn=ffn, ffn_width=ffn_width, **switches)

    presets = {}
    for size in MATCHED:
        presets[f"gpt2-{size}"] = build("gpt2", size, "mlp")
        presets[f"llama-{size}"] = build("llama", size, "swiglu")
    for size, norm, bias, ffn, positions in itertools.product(
        MATCHED, ("layernorm", "rmsnorm"), ("bias", "nobias"), ("mlp", "swiglu"), ("learned", "rope")
    ):
        presets[f"matched-{norm}-{bias}-{ffn}-{positions}-{size}"] = build(
            "gpt2",
            size,
            ffn,
            norm=norm,
            norm_bias=bias == "bias",
            attention_bias="all" if bias == "bias" else "none",
            ffn_bias=bias == "bias",
            activation="gelu_tanh" if ffn == "mlp" else "silu",
            positions=positions,
        )
    return presets


def _progression_presets() -> dict[str, ModelConfig]:
    """The nine rows of the head-progression note, as published (no attention scale) and with 1/sqrt(d_h)."""
    presets = {}
    for total, (rising, constant) in PROGRESSIONS.items():
        rows = {
            "ascending": sort_ascending(parse_heads(rising)),
            "constant": parse_heads(constant),
            "descending": sort_descending(parse_heads(rising)),
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


def _openelm_presets() -> dict[str, ModelConfig]:
    """The released models' layers: rising head counts and feed-forward widths."""

    def nearest(value: float, multiple: int) -> int:
        """corenet's make_divisible: the nearest multiple, the next where that is below 0.9 of the value."""
        found = max(multiple, int(value + multiple / 2) // multiple * multiple)
        return found + multiple if found < 0.9 * value else found

    presets = {}
    for size, (d_model, layers, head_dim) in OPENELM.items():
        along = [layer / (layers - 1) for layer in range(layers)]
        heads = [nearest(round(0.5 + 0.5 * x, 2) * d_model, 4 * head_dim) // head_dim for x in along]
        presets[f"openelm-{size}"] = block(
            "qwen3",
            vocab_size=32000,
            context_length=2048,
            d_model=d_model,
            heads=heads,
            kv_heads=[count // 4 for count in heads],
            head_dim=[head_dim] * layers,
            ffn_width=[nearest(round(0.5 + 3.5 * x, 2) * d_model, 256) for x in along],
            norm_eps=1e-6,
        )
    return presets


def _variable_width_presets() -> dict[str, ModelConfig]:
    """The paper's residual streams with wide ends and a narrow waist, and uniform models to compare with."""
    presets = {}
    for size, (d_model, layers) in VARIABLE.items():
        waist = variable_widths(d_model, layers, multiple=32)
        for name, widths in ((f"waist-{size}", waist), (f"uniform-{size}", (d_model,) * layers)):
            presets[name] = block(
                "llama",
                vocab_size=100277,
                context_length=4096,
                d_model=d_model,
                heads=make_uniform(16, layers),
                block_width=widths,
                ffn_width=[4 * width for width in widths],
                tie_embeddings=False,
            )
    return presets


def _tiny_presets() -> dict[str, ModelConfig]:
    """Small enough to train on two CPU cores (tiny, and micro: prism-micro is the default run) or in a test
    (nano).

    The vocabulary sizes are placeholders; a run replaces them by its tokenizer's.
    """
    schedules = {
        "prism-tiny": TINY_PRISM,
        "uniform-tiny": make_uniform(12, 6),
        "descending-tiny": sort_descending(TINY_PRISM),
        "shuffled-tiny": shuffle(TINY_PRISM, seed=0),
    }
    presets = {name: block("llama", **TINY, ffn_width=512, heads=heads) for name, heads in schedules.items()}
    micro = {
        "prism-micro": MICRO_PRISM,
        "uniform-micro": make_uniform(8, 4),
        "descending-micro": sort_descending(MICRO_PRISM),
        "uniform-micro8": make_uniform(8, 8),  # of eight layers
    }
    presets |= {name: block("llama", **MICRO, ffn_width=384, heads=heads) for name, heads in micro.items()}
    windows = [64 if layer % 2 else None for layer in range(6)]
    presets["gpt2-tiny"] = block("gpt2", **TINY, ffn_width=768, heads=make_uniform(12, 6))
    presets["gptneo-tiny"] = block(
        "gptneo", **TINY, ffn_width=768, heads=make_uniform(12, 6), local_window=windows
    )
    presets["prism-nano"] = block("llama", **NANO, ffn_width=128, heads=(2, 3, 4, 4))
    presets["gpt2-nano"] = block("gpt2", **NANO, ffn_width=192, heads=make_uniform(4, 4))
    return presets


_PRESETS = (
    _scale_presets()
    | _matched_presets()
    | _progression_presets()
    | _openelm_presets()
    | _variable_width_presets()
    | _tiny_presets()
)


def preset_names() -> list[str]:
    """Every preset's name, in the order of the listing."""
    return list(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The config of that name; raises UserError, naming the closest one, if there is none."""
    if name not in _PRESETS:
        hint = suggest(name, _PRESETS) or "; `head-schedules presets` lists them"
        raise UserError(f"model: no preset {quote(name)}{hint}")
    return _PRESETS[name]
