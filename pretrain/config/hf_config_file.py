"""Reads config.json of a Hugging Face folder: every value is declared, and checked before anything is built.

No library reads the file: transformers' own configuration is made from ours
(``pretrain.hf.formats.folder_config``). Exports use the same tables of names. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import psutil
from pydantic import Field, create_model

from model.blocks import block
from model.config import ModelConfig
from model.declared import STRICT, NonNegativeFloat, PositiveFloat, from_dict, to_dict
from model.errors import UserError, quote
from model.heads import MOST_LAYERS
from model.schedules import Count, Size
from pretrain.utils.parsing import read_json_object

Format = Literal["native", "llama", "qwen3", "gpt2", "mistral", "qwen2", "smollm3"]
FORMATS = get_args(Format)
LLAMA_LIKE: tuple[Format, ...] = ("llama", "qwen3", "mistral", "qwen2", "smollm3")
"""Formats that are padded where layers differ, and have the rotary scaling in their rope_parameters."""
MODEL_TYPES: dict[str, Format] = {"head_schedule": "native", **{name: name for name in FORMATS[1:]}}
"""The format of a folder by the model_type in its config.json."""

# Fields of a Llama that another class of its kind does not have.
_CONSTANT: dict[Format, tuple[str, ...]] = {
    "qwen3": ("ffn_bias",),
    "qwen2": ("ffn_bias", "attention_bias"),
    "mistral": ("ffn_bias", "attention_bias"),
}
# Our field -> its name in the configuration of each format. None: the class has the value of our block kind
# alone.
SETTINGS: dict[str, dict[Format, str | None]] = {
    ours: dict[Format, str | None]({"native": native, "gpt2": gpt2})
    | {kind: None if ours in _CONSTANT.get(kind, ()) else llama for kind in LLAMA_LIKE}
    for ours, (native, llama, gpt2) in {
        "vocab_size": ("vocab_size", "vocab_size", "vocab_size"),
        "context_length": ("max_position_embeddings", "max_position_embeddings", "n_positions"),
        "d_model": ("hidden_size", "hidden_size", "n_embd"),
        "ffn_width": ("intermediate_size", "intermediate_size", "n_inner"),
        "block_width": ("block_width", None, None),
        "ffn": ("feed_forward", None, None),
        "activation": ("hidden_act", "hidden_act", "activation_function"),
        "norm": ("norm", None, None),
        "norm_eps": ("norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
        "norm_bias": ("norm_bias", None, None),
        "attention_bias": ("attention_bias", "attention_bias", None),
        "ffn_bias": ("mlp_bias", "mlp_bias", None),
        "positions": ("positions", None, None),
        "rope_base": ("rope_theta", "rope_theta", None),
        "rotary_share": ("partial_rotary", None, None),
        "rope_scaling": ("rotary_scaling", None, None),  # of a Llama or a Qwen3: in its rope_parameters
        "attention_gate": ("attention_gate", None, None),
        "qk_norm": ("qk_norm", None, None),
        "attention_scale": ("attention_scale", None, "scale_attn_weights"),
        "attention_scale_base": ("attention_scale_base", None, None),
        "logit_softcap": ("final_logit_softcapping", None, None),
        "z_loss": ("z_loss", None, None),  # of training alone
        "parametrization": ("parametrization", None, None),
        "base_width": ("base_width", None, None),
        "tie_embeddings": ("tie_word_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
        "init_std": ("initializer_range", "initializer_range", "initializer_range"),
    }.items()
}
# Values that a format names differently: theirs -> ours. Of several names for one value, the first is
# written.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
    "relu2": "relu2",
}
LLAMA3 = {"original_context_length": "original_max_position_embeddings"} | {
    name: name for name in ("factor", "low_freq_factor", "high_freq_factor")
}
"""Fields of Llama3Scaling, and their names in the rope_parameters of a Llama and its kind."""
YARN = {name: name for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate")}
YARN |= {"original_context_length": "original_max_position_embeddings"}
ROPE_TYPES: dict[str, dict[str, str]] = {"llama3": LLAMA3, "linear": {"factor": "factor"}, "yarn": YARN}
"""The fields of each kind of RopeScaling, and their names there."""
VALUES: dict[tuple[str, Format], dict[Any, Any]] = {
    **{("activation", kind): _ACTIVATIONS for kind in ("native", *LLAMA_LIKE)},
    ("activation", "gpt2"): {"gelu_new": "gelu_tanh"} | _ACTIVATIONS,
    **{("attention_bias", kind): {False: "none", True: "all"} for kind in ("llama", "qwen3", "smollm3")},
    ("attention_scale", "gpt2"): {False: "none", True: "sqrt_head_dim"},
}

# What our network lacks, for folders that need it: by model_type, and by a setting's only value.
_PARALLEL = "attention and feed-forward in parallel"
_EXPERTS = "experts"
_ALIBI = "ALiBi positions"
_LACKING = {
    "bloom": f"{_ALIBI}, and a norm after the embedding",
    "cohere": f"{_PARALLEL}, and interleaved rotary pairs",
    "cohere2": f"{_PARALLEL}, and interleaved rotary pairs",
    "deepseek_v2": f"latent attention, and {_EXPERTS}",
    "deepseek_v3": f"latent attention, and {_EXPERTS}",
    "falcon": f"{_PARALLEL}, and q, k and v joined in one tensor",
    "gemma": "embeddings scaled by the root of their width, and norms that multiply by 1 + weight",
    "gemma2": "norms after the sublayers, and soft caps in attention",
    "gemma3_text": "norms after the sublayers, and two rotary bases",
    "glm4": "norms after the sublayers, and interleaved rotary pairs",
    "gpt_neo": "a reader of its settings; its network is the block kind gptneo",
    "gpt_neox": f"{_PARALLEL}, and q, k and v joined in one tensor",
    "gptj": f"{_PARALLEL}, and interleaved rotary pairs",
    "granite": "multipliers of embeddings, residuals and attention",
    "mamba": "state spaces",
    "mamba2": "state spaces",
    "mixtral": _EXPERTS,
    "mpt": _ALIBI,
    "olmo": "norms without weights, and clipped q, k and v",
    "olmo2": "norms after the sublayers, and norms over all heads of q and k together",
    "olmo3": "norms after the sublayers, and norms over all heads of q and k together",
    "opt": "position embeddings that begin at 2, and relu",
    "phi": f"{_PARALLEL}, and biases of norms and LM head",
    "phi3": "q, k and v (and gate and up) joined in one tensor",
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": f"linear attention, and {_EXPERTS}",
    "stablelm": "a reader of its settings",
    "starcoder2": "a reader of its settings",
}
# Settings that change what a model computes, where its class reads them; and their values of no effect.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sliding_window", "final_logit_softcapping", "attn_logit_softcapping"), (None,)),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (None, 1.0)
    ),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "clip_qkv", "no_rope_layers"), (None,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qk_norm", "use_qk_norm"), (None, False, "none")),
}
_ONLY: dict[str, tuple[Any, str]] = {
    "partial_rotary_factor": (1.0, "rotary positions on a part of each head"),
    "scale_attn_by_inverse_layer_idx": (False, "attention logits divided by the layer's number"),
    "add_cross_attention": (False, "cross-attention"),
    "quantization_config": (None, "quantized weights"),
}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")

# ---------------------------------------------------------------------- the declaration

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Settings = dict[str, tuple[Any, Any]]
"""Type and default by name; ... as the default: there is none."""


LayerSetting = Literal[
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "sliding_window"
]
_ATTENTION: Settings = {
    "num_hidden_layers": (Layers, ...),
    "num_attention_heads": (Size, ...),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (Size | None, None)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict[str, Any] | None, None)),
}
_KINDS: Settings = {
    "layer_types": (list[Literal["full_attention", "sliding_attention"]] | None, None),
}
# The defaults below are those of transformers' classes.
_QWENS: Settings = (
    _ATTENTION
    | _KINDS
    | {
        "intermediate_size": (Size, ...),
        "use_sliding_window": (bool, False),
        "sliding_window": (Size | None, 4096),
        "max_window_layers": (Annotated[int, Field(ge=0)], 28),
    }
)
_OWN: dict[Format, Settings] = {
    "native": _ATTENTION
    | _KINDS
    | {
        "num_attention_heads": (Count, ...),  # 0: a layer without attention
        **dict.fromkeys(("num_key_value_heads", "head_dim"), (Count | None, None)),
        "per_layer_config": (dict[str, dict[LayerSetting, Count | None]] | None, None),
        "logit_scale": (PositiveFloat | None, None),  # older folders have none
    },
    "llama": {name: kind for name, kind in _ATTENTION.items() if name != "sliding_window"}
    | {"intermediate_size": (Size, ...)},
    "qwen3": _QWENS | {"num_key_value_heads": (Size | None, 32), "head_dim": (Size, 128)},
    "mistral": _ATTENTION
    | {
        "intermediate_size": (Size, ...),
        "num_key_value_heads": (Size | None, 8),
        "sliding_window": (Size | None, 4096),
    },
    "qwen2": _QWENS | {"num_key_value_heads": (Size | None, 32)},
    "smollm3": _QWENS
    | {
        "num_key_value_heads": (Size | None, 4),
        "sliding_window": (Size | None, None),
        "no_rope_layers": (list[Literal[0, 1]] | None, None),
        "no_rope_layer_interval": (Size, 4),
    },
    "gpt2": {
        "n_layer": (Layers, ...),
        "n_head": (Size, ...),
        **dict.fromkeys(("n_inner", "n_ctx"), (Size | None, None)),
    },
}
# Not used here, but what is written there is to be what others read.
_COMMON: Settings = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "pretraining_tp"), (int | None, None)),
    **dict.fromkeys(("dtype", "torch_dtype", "transformers_version"), (str | None, None)),
    **dict.fromkeys(_DROPOUTS, (NonNegativeFloat, 0.0)),
    **dict.fromkeys(("use_cache", "reorder_and_upcast_attn"), (bool | None, None)),
    "eos_token_id": (int | list[int] | None, None),
    "architectures": (list[str] | None, None),
    "auto_map": (dict[str, Any] | None, None),
}
# Of transformers' classes, for what older folders do not say; a native folder says everything.
_LLAMAS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "rope_theta": 10000.0}
_DEFAULTS: dict[Format, dict[str, Any]] = {
    "native": {
        "block_width": None,
        "partial_rotary": 1.0,
        "rotary_scaling": None,
        "qk_norm": "none",
        "attention_gate": "none",
    }
    | {"attention_scale_base": None, "final_logit_softcapping": None, "z_loss": 0.0}
    | {"parametrization": "standard", "base_width": None},
    "llama": _LLAMAS | {"mlp_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02},
    **dict.fromkeys(
        ("qwen3", "mistral", "qwen2"), _LLAMAS | {"tie_word_embeddings": False, "initializer_range": 0.02}
    ),
    "smollm3": _LLAMAS
    | {"rope_theta": 2e6, "mlp_bias": False, "tie_word_embeddings": True, "initializer_range": 0.02},
    "gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
    | {"tie_word_embeddings": True, "initializer_range": 0.02},
}


@functools.cache
def _declaration(chosen: Format) -> Any:
    """The class of a format's settings; names that it does not have are left to other programs."""
    kinds = get_type_hints(ModelConfig, include_extras=True)
    settings: Settings = {}
    for ours, names in SETTINGS.items():
        if (theirs := names[chosen]) is not None:
            values = VALUES.get((ours, chosen), {})
            named: Any = bool if True in values else Literal[tuple(values)] if values else kinds[ours]
            settings[theirs] = (named, _DEFAULTS[chosen].get(theirs, ...))
    fields: Any = _COMMON | settings | _OWN[chosen]
    return create_model("Settings", __config__={**STRICT, "extra": "ignore"}, **fields)


# ---------------------------------------------------------------------- a folder


@dataclass(frozen=True)
class FolderModel:
    """What a folder's config.json describes."""

    model: ModelConfig
    format: Format
    notes: list[str]
    """Lines for whoever trains it further."""


def read_model(folder: str | Path) -> FolderModel:
    """Our configuration of the model that a folder's config.json describes.

    Raises:
        UserError: no config.json, an architecture or a setting that our network does not have, a value
            outside its declaration, a context whose tables this machine cannot hold.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        problem = "has no config.json" if path.parent.is_dir() else "is not a folder or does not exist"
        valid = "an exported folder or a run's folder, such as runs/NAME"
        if (Path(folder) / "config.yaml").is_file():
            problem, valid = "is a run's folder", "one in Hugging Face format, such as hf/NAME"
        raise UserError(f"model: {str(folder)!r} {problem}; give {valid}")
    written, where = read_json_object(path, "model"), f"model: {path}"
    kind = written.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        lacking = _LACKING.get(str(kind), "a reader of its settings and tensors")
        raise UserError(
            f"{where}: model_type {quote(kind)} is not supported; what is missing here: {lacking}; valid: "
            f"{', '.join(MODEL_TYPES)}"
        )
    chosen = MODEL_TYPES[kind]
    for name in written["architectures"] if isinstance(written.get("architectures"), list) else ():
        if str(name).endswith(("Classification", "QuestionAnswering")):
            raise UserError(
                f"{where}: architectures {quote(name)} is not supported; what is missing here: its head; "
                "valid: a language model"
            )
    base = written.get("rope_theta", ...)  # the older name of that in rope_parameters
    for rope in (
        written.get("rope_scaling"),
        written.get("rope_parameters"),
    ):  # the older name, the newer one
        if isinstance(rope, dict):
            if base is not ... and base != (inner := rope.get("rope_theta", base)):
                raise UserError(
                    f"{where}: rope_theta {quote(base)} contradicts the {quote(inner)} of rope_parameters; "
                    "give one of them"
                )
            scaling = rope.get("rope_type", rope.get("type"))
            kept = written.get("rope_type") if scaling in (None, "default") else scaling
            written = written | rope | {"rope_type": kept}
    for name, (only, lacking) in _ONLY.items():
        if written.get(name) not in (only, None):
            raise UserError(
                f"{where}: {name} {quote(written[name])} is not supported; what is missing here: {lacking}; "
                f"valid: {only!r}"
            )
    given = from_dict(_declaration(chosen), written, where)
    try:
        model = _build_model(given, chosen)
        if chosen == "native":
            _check_logit_scale(given.logit_scale, model)
        scaling, notes = _rope_scaling(written, chosen, model.context_length)
        model = model.replace(rope_scaling=scaling) if scaling is not None else model
        _check_rotary_tables(model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    notes += [f"{name} {value} is left out" for name in _DROPOUTS if (value := getattr(given, name, 0))]
    notes += [
        f"{name} {quote(written[name], plain=True)} is left out: transformers reads none in a {kind}"
        for name, without in _NO_EFFECT.items()
        if not hasattr(given, name) and written.get(name) not in without
    ]
    return FolderModel(model, chosen, notes)


def _rope_scaling(
    written: dict[str, Any], chosen: Format, context_length: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """The rotary scaling of a folder that has it in its rope_parameters, as RopeScaling reads it; notes."""
    kind = written.get("rope_type")
    if kind in (None, "default"):
        return None, []
    if kind == "dynamic" and chosen in LLAMA_LIKE:  # the longer the text, the longer the wavelengths
        return None, [f"dynamic RoPE scaling, which begins beyond {context_length:,} tokens, is left out"]
    valid = ("default", *((*ROPE_TYPES, "dynamic") if chosen in LLAMA_LIKE else ()))
    if kind not in valid:
        raise UserError(
            f"rope_type {quote(kind)} is not supported; what is missing here: that RoPE scaling; valid: "
            f"{', '.join(valid)}"
        )
    fields = ROPE_TYPES[kind]
    for name in ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"):
        value = written.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise UserError(f"{name}: {quote(value)} is not valid; give a positive number")
    values = {ours: written[theirs] for ours, theirs in fields.items() if written.get(theirs) is not None}
    if "original_context_length" in fields:
        values.setdefault("original_context_length", context_length)
    if kind == "yarn" and "factor" not in values:
        values["factor"] = context_length / values["original_context_length"]
    one, all_dims = written.get("mscale"), written.get("mscale_all_dim")
    if kind == "yarn" and one and all_dims and "attention_factor" not in values:

        def magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(max(values["factor"], 1.0)) + 1.0

        values["attention_factor"] = magnitude(one) / magnitude(all_dims)
    return {"type": kind, **values}, []


def _build_model(given: Any, chosen: Format) -> ModelConfig:
    values = {}
    for ours, names in SETTINGS.items():
        if (theirs := names[chosen]) is not None:
            value = getattr(given, theirs)
            if theirs == "rope_theta" and value is None:  # transformers would take its own default
                raise UserError("rope_theta: null is not valid; give a number")
            values[ours] = to_dict(VALUES[ours, chosen][value] if (ours, chosen) in VALUES else value)
    if chosen == "gpt2":
        values["ffn_width"] = values["ffn_width"] or 4 * given.n_embd
        return _shorten_schedules(block("gpt2", **values, heads=[given.n_head] * given.n_layer))
    count = given.num_hidden_layers
    if chosen == "llama" and given.hidden_size % given.num_attention_heads:
        raise UserError(
            f"num_attention_heads: {given.num_attention_heads} does not divide {given.hidden_size}"
        )
    own = getattr(given, "per_layer_config", None) or {}
    kinds = getattr(given, "layer_types", None)
    if chosen in ("qwen2", "qwen3"):
        kinds = _kinds_of_qwen(given)
    if chosen == "mistral":
        kinds = ["sliding_attention"] * count
    if chosen == "smollm3":
        rotated = _rotated_layers(given)
        values["rope_base"] = [given.rope_theta if turned else None for turned in rotated]
        kinds = _kinds_of_smollm3(given, rotated)
    kinds = ["full_attention"] * count if kinds is None else kinds
    if len(kinds) != count:
        raise UserError(f"layer_types: {len(kinds)} entries given; give one for each of {count} layers")
    if beyond := own.keys() - set(map(str, range(count))):
        raise UserError(f"per_layer_config: {quote(min(beyond))} is not a layer; give 0 to {count - 1}")

    def schedule(name: str, default: int | None) -> list[Any]:
        common = default if (value := getattr(given, name, None)) is None else value
        values = [own.get(str(layer), {}).get(name) for layer in range(count)]
        return [common if value is None else value for value in values]

    windows = zip(schedule("sliding_window", None), kinds, strict=True)
    local = [window if kind == "sliding_attention" else None for window, kind in windows]
    schedules = {
        "heads": schedule("num_attention_heads", None),
        "kv_heads": schedule("num_key_value_heads", given.num_attention_heads),
        "head_dim": schedule("head_dim", given.hidden_size // (given.num_attention_heads or 1)),
        "ffn_width": schedule("intermediate_size", None),
        "local_window": local if any(local) else None,
    }
    return _shorten_schedules(
        block(chosen if chosen in ("qwen2", "qwen3") else "llama", **values | schedules)
    )


def _check_logit_scale(given: float | None, model: ModelConfig) -> None:
    """Reject a factor on the logits that is not the one of our network."""
    ours = 1 / model.width_ratio
    if given is not None and not math.isclose(given, ours, rel_tol=1e-6):
        raise UserError(
            f"logit_scale: {given!r} is not supported with base_width {model.base_width}; valid: {ours!r}"
        )


def _rotated_layers(given: Any) -> list[bool]:
    """Which layers of a SmolLM3 have positions."""
    layers, interval = range(given.num_hidden_layers), given.no_rope_layer_interval
    if given.no_rope_layers is None:
        return [(layer + 1) % interval != 0 for layer in layers]
    if len(given.no_rope_layers) < len(layers):
        raise UserError(
            f"no_rope_layers: {len(given.no_rope_layers)} entries given; give one for each of {len(layers)} "
            "layers"
        )
    return [bool(given.no_rope_layers[layer]) for layer in layers]


def _kinds_of_smollm3(given: Any, rotated: list[bool]) -> list[str]:
    """The kind of each layer's attention, as transformers' class reads it."""
    window = given.sliding_window if given.use_sliding_window else None
    if window is None:
        return ["full_attention"] * len(rotated)
    if given.layer_types is not None:
        return list(given.layer_types)
    return ["full_attention" if turned else "sliding_attention" for turned in rotated]


def _kinds_of_qwen(given: Any) -> list[str]:
    """The kind of each layer's attention, as transformers' class reads it."""
    window = given.sliding_window if given.use_sliding_window else None
    if given.layer_types is None:
        full = min(given.max_window_layers, given.num_hidden_layers) if window else given.num_hidden_layers
        return ["full_attention"] * full + ["sliding_attention"] * (given.num_hidden_layers - full)
    if window is None and "sliding_attention" in given.layer_types:
        raise UserError(
            "layer_types: 'sliding_attention' has no window; set use_sliding_window and sliding_window, or "
            "write 'full_attention'"
        )
    return list(given.layer_types)


def _shorten_schedules(model: ModelConfig) -> ModelConfig:
    """The same model with None for schedules that equal the default."""
    default: dict[str, None] = {}
    if model.kv_heads == model.heads:
        default["kv_heads"] = None
    if all(model.attention_width(layer) == model.layer_width(layer) for layer in model.attention_layers):
        default["head_dim"] = None
    return model.replace(**default)


def _check_rotary_tables(model: ModelConfig) -> None:
    """Reject a context for which more memory would be taken than there is."""
    if model.positions == "rope":
        dims = [dims for dims, _ in model.rotary_kinds]
        # Cosines and sines in fp32, half a head each, and the angles while they are made.
        needed = model.context_length * (4 * sum(dims) + 2 * max(dims, default=0))
        available = psutil.virtual_memory().available
        if needed > available:
            raise UserError(
                f"max_position_embeddings: {model.context_length:,} needs {needed / 1e9:,.0f} GB for a table "
                f"of rotary angles, {available / 1e9:,.0f} GB are free; write the length that you will use"
            )
