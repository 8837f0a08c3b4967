"""The three Hugging Face formats as tables: our settings and parameters by the names that each of them gives.

``native`` is the architecture shipped beside this file, for any model; ``llama`` is transformers' own
LlamaForCausalLM, zero-padded where layers differ; ``gpt2`` its GPT2LMHeadModel. The last two need no remote
code. Exports and imports read the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from statistics import mode
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from model.config import BLOCKS, ModelConfig, block
from model.errors import UserError
from model.parameters import parameter_specs
from pretrain.hf.configuration_head_schedule import HeadScheduleConfig
from pretrain.hf.padding import padded, padding_for

Format = Literal["native", "llama", "gpt2"]
FORMATS = get_args(Format)
ARCHITECTURES = {"native": "HeadScheduleForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
MODEL_TYPES: dict[str, Format] = {"head_schedule": "native", "llama": "llama", "gpt2": "gpt2"}
"""The format of a folder by the model_type in its config.json."""

# Our field -> its name in the configuration of each format. None: the class has the value of our block kind
# alone.
SETTINGS: dict[str, dict[Format, str | None]] = {
    ours: dict(zip(FORMATS, theirs, strict=True))
    for ours, theirs in {
        "vocab_size": ("vocab_size", "vocab_size", "vocab_size"),
        "context_length": ("max_position_embeddings", "max_position_embeddings", "n_positions"),
        "d_model": ("hidden_size", "hidden_size", "n_embd"),
        "ffn_width": ("intermediate_size", "intermediate_size", "n_inner"),
        "ffn": ("feed_forward", None, None),
        "activation": ("hidden_act", "hidden_act", "activation_function"),
        "norm": ("norm", None, None),
        "norm_eps": ("norm_eps", "rms_norm_eps", "layer_norm_epsilon"),
        "norm_bias": ("norm_bias", None, None),
        "attention_bias": ("attention_bias", "attention_bias", None),
        "ffn_bias": ("mlp_bias", "mlp_bias", None),
        "positions": ("positions", None, None),
        "rope_base": ("rope_theta", "rope_theta", None),
        "attention_scale": ("attention_scale", None, "scale_attn_weights"),
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
}
_VALUES: dict[tuple[str, Format], dict[Any, Any]] = {
    ("activation", "native"): _ACTIVATIONS,
    ("activation", "llama"): _ACTIVATIONS,
    ("activation", "gpt2"): {"gelu_new": "gelu_tanh"} | _ACTIVATIONS,
    ("attention_bias", "llama"): {False: "none", True: "all"},
    ("attention_scale", "gpt2"): {False: "none", True: "sqrt_head_dim"},
}
# Settings of a folder that our network has with this value only.
_ONLY = {
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")

# Our part -> its name in native and Llama folders, and in GPT-2's, which join q, k and v.
_PARTS: dict[str, tuple[str, str | None]] = {
    "token_embedding": ("model.embed_tokens", "transformer.wte"),
    "position_embedding": ("model.embed_positions", "transformer.wpe"),
    "layers.N.attention_norm": ("model.layers.N.input_layernorm", "transformer.h.N.ln_1"),
    "layers.N.attention.q": ("model.layers.N.self_attn.q_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.k": ("model.layers.N.self_attn.k_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.v": ("model.layers.N.self_attn.v_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.o": ("model.layers.N.self_attn.o_proj", "transformer.h.N.attn.c_proj"),
    "layers.N.ffn_norm": ("model.layers.N.post_attention_layernorm", "transformer.h.N.ln_2"),
    "layers.N.ffn.gate": ("model.layers.N.mlp.gate_proj", None),
    "layers.N.ffn.up": ("model.layers.N.mlp.up_proj", "transformer.h.N.mlp.c_fc"),
    "layers.N.ffn.down": ("model.layers.N.mlp.down_proj", "transformer.h.N.mlp.c_proj"),
    "final_norm": ("model.norm", "transformer.ln_f"),
    "output": ("lm_head", "lm_head"),
}
# GPT-2's Conv1D holds [in, out].
_TRANSPOSED = re.compile(r"transformer\.h\.\d+\.\w+\.c_(attn|proj|fc)\.weight")


# ---------------------------------------------------------------------- which format


def why_not(model: ModelConfig, chosen: Format) -> list[str]:
    """The settings that the format's class does not support, as ``field 'value' (needed)``; empty if it fits.

    That llama needs padding where layers differ is no reason.
    """
    if chosen == "native":
        return []
    problems = []
    defaults = {item.name: item.default for item in fields(ModelConfig)}
    switches = defaults | BLOCKS[chosen]
    for name, theirs in SETTINGS.items():
        valid: list[Any] = list(dict.fromkeys(_VALUES.get((name, chosen), {}).values()))
        if theirs[chosen] is None and name != "rope_base":  # no learned positions have that
            valid = [switches[name]]
        if valid and getattr(model, name) not in valid:
            problems.append(f"{name} {getattr(model, name)!r} ({' or '.join(map(repr, valid))})")
    if any(window is not None for window in model.local_window or ()):
        problems.append("local_window (no window)")
    if chosen == "gpt2":
        if not is_uniform(model):
            problems.append("heads (the same in every layer)")
        elif model.layer_kv_heads(0) != model.heads[0]:
            problems.append("kv_heads (as many as heads)")
        elif model.attention_width(0) != model.d_model:
            problems.append("head_dim (d_model / heads)")
    return problems


def is_uniform(model: ModelConfig) -> bool:
    """Whether all layers have the same heads, key/value heads and head dim."""
    layers = range(model.num_layers)
    return len({(model.heads[i], model.layer_kv_heads(i), model.layer_head_dim(i)) for i in layers}) == 1


def choose_format(model: ModelConfig, wanted: str) -> Format:
    """Choose native, llama or gpt2 as the user asked (or auto: llama or gpt2 where nothing needs padding).

    Raises:
        UserError: the format cannot hold the model.
    """
    if wanted == "native":
        return "native"
    if wanted == "llama":
        if problems := why_not(model, "llama"):
            raise UserError(
                f"format: 'llama' cannot hold this model: {', '.join(problems)}; valid: native or auto"
            )
        return "llama"
    if not why_not(model, "gpt2"):
        return "gpt2"
    plain = is_uniform(model) and not why_not(model, "llama") and model.d_model % model.heads[0] == 0
    return "llama" if plain else "native"


# ---------------------------------------------------------------------- tensors


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameters' names and shapes without padded vocabulary rows, in the order of named_parameters."""
    return {
        name: (model.vocab_size, *spec.shape[1:]) if spec.vocabulary else spec.shape
        for name, spec in parameter_specs(model).items()
    }


def folder_name(name: str, chosen: Format) -> str:
    """The name of the tensor that holds our parameter in a folder of the format."""
    part, kind = name.rsplit(".", 1)
    layer = re.search(r"\d+", part)
    theirs = _PARTS[re.sub(r"\d+", "N", part)][chosen == "gpt2"]
    assert theirs is not None, f"{name} has no place in {chosen}"
    return f"{theirs.replace('N', layer[0]) if layer else theirs}.{kind}"


def folder_tensors(model: ModelConfig, chosen: Format) -> dict[str, tuple[str, ...]]:
    """The names of a folder's tensors, each with our parameters that it holds, joined along dimension 0."""
    sources: dict[str, tuple[str, ...]] = {}
    for name in parameter_shapes(model):
        theirs = folder_name(name, chosen)
        sources[theirs] = (*sources.get(theirs, ()), name)
    return sources


def is_transposed(name: str) -> bool:
    """Whether a folder holds the tensor of this name as [in, out]; ours are [out, in]."""
    return _TRANSPOSED.fullmatch(name) is not None


# ---------------------------------------------------------------------- exports


def folder_weights(model: ModelConfig, chosen: Format, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the folder of *model* in the chosen format, by their names there.

    Args:
        parameters: ours by name, without padded vocabulary rows.
    """
    weights = {}
    for name, sources in folder_tensors(model, chosen).items():
        parts = [parameters[source] for source in sources]
        if chosen == "llama":
            parts = [padded(model, sources[0], parts[0])]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        weights[name] = tensor.t().contiguous() if is_transposed(name) else tensor
    return weights


def folder_config(model: ModelConfig, chosen: Format, extra: dict[str, Any]) -> Any:
    """The transformers configuration of *model* in the format; *extra*: more of its fields.

    Raises:
        UserError: llama, and no uniform shape holds the layers.
    """
    from transformers import GPT2Config, LlamaConfig

    settings: dict[str, Any] = {**extra, "architectures": [ARCHITECTURES[chosen]]}
    for name, names in SETTINGS.items():
        if (theirs := names[chosen]) is not None:
            value = getattr(model, name)
            translation = _VALUES.get((name, chosen), {value: value})
            settings[theirs] = next(their for their, our in translation.items() if our == value)
    layers = range(model.num_layers)
    if chosen == "gpt2":
        return GPT2Config(
            n_layer=model.num_layers,
            n_head=model.heads[0],
            # Trained without dropout; GPT-2's own default is 0.1.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # The old name of n_positions: llama.cpp's converter reads no other.
            **settings | {"n_ctx": model.context_length},
        )
    settings["rope_theta"] = float(model.rope_base)
    if chosen == "llama":
        padding = padding_for(model)
        return LlamaConfig(
            num_hidden_layers=model.num_layers,
            num_attention_heads=padding.heads,
            num_key_value_heads=padding.kv_heads,
            head_dim=padding.head_dim,
            **settings,
        )
    windows = [model.layer_window(layer) for layer in layers]
    schedules: dict[str, list[Any]] = {
        "num_attention_heads": list(model.heads),
        "num_key_value_heads": [model.layer_kv_heads(layer) for layer in layers],
        "head_dim": [model.layer_head_dim(layer) for layer in layers],
    }
    if any(windows):  # layers of full attention do not read theirs
        usual = mode(window for window in windows[::-1] if window)
        schedules["sliding_window"] = [window or usual for window in windows]
    if any(len(set(values)) > 1 for values in schedules.values()):
        # transformers leaves out what equals the common values.
        settings["per_layer_config"] = {
            layer: {name: values[layer] for name, values in schedules.items()} for layer in layers
        }
    config = HeadScheduleConfig(
        num_hidden_layers=model.num_layers,
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        **{name: mode(values[::-1]) for name, values in schedules.items()},
        **settings,
    )
    config.auto_map = {
        "AutoConfig": "configuration_head_schedule.HeadScheduleConfig",
        "AutoModel": "modeling_head_schedule.HeadScheduleModel",
        "AutoModelForCausalLM": "modeling_head_schedule.HeadScheduleForCausalLM",
    }
    return config


# ---------------------------------------------------------------------- imports


def model_of(config: Any) -> tuple[ModelConfig, list[str]]:
    """Our configuration of the model that a transformers configuration describes, and notes to print.

    Raises:
        UserError: a setting that our network does not have.
    """
    chosen = MODEL_TYPES[config.model_type]
    rope = getattr(config, "rope_parameters", None) or {}
    given = {"rope_theta": 10000.0} | config.to_dict() | rope
    for name, only in _ONLY.items():
        if given.get(name, only) != only:
            raise UserError(f"from_hf: {name} {given[name]!r} is not supported; valid: {only!r}")
    values: dict[str, Any] = {}
    for name, names in SETTINGS.items():
        if (theirs := names[chosen]) is not None:
            value = values[name] = given[theirs]
            if translation := _VALUES.get((name, chosen)):
                if value not in translation:
                    valid = ", ".join(map(str, translation))
                    raise UserError(f"from_hf: {theirs} {value!r} is not supported; valid: {valid}")
                values[name] = translation[value]
    if chosen == "gpt2" and values["ffn_width"] is None:
        values["ffn_width"] = 4 * config.n_embd
    layers = list(config.per_layer_config)
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    if len(kinds) != len(layers):
        raise UserError(f"from_hf: layer_types has {len(kinds)} entries, there are {len(layers)} layers")
    windows = [
        layer.sliding_window if kind == "sliding_attention" else None
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    schedules = {
        "heads": [layer.num_attention_heads for layer in layers],
        "kv_heads": [getattr(layer, "num_key_value_heads", layer.num_attention_heads) for layer in layers],
        "head_dim": [layer.head_dim for layer in layers] if chosen != "gpt2" else None,
        "local_window": windows if any(windows) else None,
    }
    notes = [f"{name} {given[name]} is left out" for name in _DROPOUTS if given.get(name)]
    return _shortest(block("gpt2" if chosen == "gpt2" else "llama", **values, **schedules)), notes


def _shortest(model: ModelConfig) -> ModelConfig:
    """The same model with None for schedules that equal the default."""
    default: dict[str, None] = {}
    if model.kv_heads == model.heads:
        default["kv_heads"] = None
    if all(model.attention_width(layer) == model.d_model for layer in range(model.num_layers)):
        default["head_dim"] = None
    return model.replace(**default)
