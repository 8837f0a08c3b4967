"""The Hugging Face formats as tables: our settings and parameters by the names that each of them gives.

``native`` is the architecture in modeling_head_schedule.py, for any model; ``llama`` is transformers' own
LlamaForCausalLM, ``qwen3`` its Qwen3ForCausalLM, both padded where layers differ; ``gpt2``, ``mistral``,
``qwen2`` and ``smollm3`` are its classes for models of exactly that architecture. All but the first need no
remote code. Exports and imports read the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from statistics import mode
from typing import Any, Literal

import torch
from torch import Tensor

from model.blocks import BLOCKS
from model.config import ModelConfig
from model.declared import to_dict
from model.errors import UserError
from model.parameters import parameter_specs
from model.schedules import YarnScaling
from pretrain.config.hf_config_file import FORMATS, LLAMA_LIKE, ROPE_TYPES, SETTINGS, VALUES, Format
from pretrain.hf.configuration_head_schedule import HeadScheduleConfig
from pretrain.hf.padding import choose_padding, pad_parameter, padded_model, scaled_model

ARCHITECTURES = {"native": "HeadScheduleForCausalLM", "llama": "LlamaForCausalLM"}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel", "mistral": "MistralForCausalLM"}
ARCHITECTURES |= {"qwen2": "Qwen2ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
PADDED: tuple[Format, ...] = ("llama", "qwen3")
"""Formats that are written on request, of layers that differ too."""
CLASSIFIERS = {
    chosen: name.replace("ForCausalLM", "ForSequenceClassification").replace(
        "LMHeadModel", "ForSequenceClassification"
    )
    for chosen, name in ARCHITECTURES.items()
}
AUTO_CLASSES = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Those of a native folder, besides the decoder alone."""

# Our part -> its name in native, Llama and Qwen3 folders, and in GPT-2's, which join q, k and v.
_PARTS: dict[str, tuple[str, str | None]] = {
    "token_embedding": ("model.embed_tokens", "transformer.wte"),
    "position_embedding": ("model.embed_positions", "transformer.wpe"),
    "layers.N.attention_norm": ("model.layers.N.input_layernorm", "transformer.h.N.ln_1"),
    "layers.N.attention.q": ("model.layers.N.self_attn.q_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.k": ("model.layers.N.self_attn.k_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.v": ("model.layers.N.self_attn.v_proj", "transformer.h.N.attn.c_attn"),
    "layers.N.attention.q_norm": ("model.layers.N.self_attn.q_norm", None),
    "layers.N.attention.k_norm": ("model.layers.N.self_attn.k_norm", None),
    "layers.N.attention.gate": ("model.layers.N.self_attn.g_proj", None),
    "layers.N.attention.head_gate": ("model.layers.N.self_attn.g_proj", None),
    "layers.N.attention.o": ("model.layers.N.self_attn.o_proj", "transformer.h.N.attn.c_proj"),
    "layers.N.ffn_norm": ("model.layers.N.post_attention_layernorm", "transformer.h.N.ln_2"),
    "layers.N.ffn.gate": ("model.layers.N.mlp.gate_proj", None),
    "layers.N.ffn.up": ("model.layers.N.mlp.up_proj", "transformer.h.N.mlp.c_fc"),
    "layers.N.ffn.down": ("model.layers.N.mlp.down_proj", "transformer.h.N.mlp.c_proj"),
    "final_norm": ("model.norm", "transformer.ln_f"),
    "output": ("lm_head", "lm_head"),
    "classifier": ("score", "score"),
}
# GPT-2's Conv1D holds [in, out].
_TRANSPOSED = re.compile(r"transformer\.h\.\d+\.\w+\.c_(attn|proj|fc)\.weight")
_QK_NORM = re.compile(r"layers\.(\d+)\.attention\.[qk]_norm\.weight")
_SLIDING = "sliding_attention"


# ---------------------------------------------------------------------- which format


def explain_unsupported(model: ModelConfig, chosen: Format) -> list[str]:
    """The settings that the format's class does not support, as ``field 'value' (needed)``; empty if it fits.

    That llama and qwen3 need padding where layers differ, or other weights for another attention_scale, is no
    reason.
    """
    if chosen == "native":
        return []
    if chosen in PADDED:
        model = scaled_model(model)
    problems = []
    defaults = {item.name: item.default for item in fields(ModelConfig)}
    switches = defaults | BLOCKS.get(chosen, {})
    for name, theirs in SETTINGS.items():
        valid: list[Any] = list(dict.fromkeys(VALUES.get((name, chosen), {}).values()))
        # No learned positions have a base; Llama and Qwen3 have the scaling in their rope_parameters.
        held = name == "z_loss" or (name == "rope_scaling" and chosen != "gpt2")
        held |= name == "rotary_share" and all(model.layer_share(at) == 1 for at in model.attention_layers)
        held |= name == "rope_base" and (isinstance(model.rope_base, float) or chosen == "smollm3")
        if theirs[chosen] is None and not held:
            valid = [switches[name]]
        if valid and getattr(model, name) not in valid:
            problems.append(f"{name} {getattr(model, name)!r} ({' or '.join(map(repr, valid))})")
    seen = {model.layer_window(layer) for layer in model.attention_layers}
    windows = seen - {None}
    windowed = chosen in ("qwen2", "qwen3", "smollm3")
    if chosen == "mistral":
        if len(seen) != 1 or not windows:
            problems.append("local_window (the same in every layer)")
    elif len(windows) > windowed:
        problems.append(f"local_window ({'one window' if windowed else 'no window'})")
    if chosen in LLAMA_LIKE and model.positions == "rope":
        bases = {_bases(model)[layer] for layer in model.attention_layers}
        if len(bases - {None}) > 1 or (None in bases) != (chosen == "smollm3"):
            problems.append(f"rope_base (one{', and null' if chosen == 'smollm3' else ' for all layers'})")
    dims = {model.layer_head_dim(layer) for layer in model.attention_layers}
    if chosen in LLAMA_LIKE and any(dim % 2 for dim in dims):
        problems.append("head_dim (even)")  # their classes reject others, also in layers without positions
    if isinstance(model.rope_scaling, YarnScaling) and chosen in LLAMA_LIKE and len(dims) > 1:
        problems.append("head_dim (the same in every layer, with yarn)")  # its ramp depends on the dims
    if chosen == "gpt2":
        if not is_uniform(model):
            problems.append("heads or ffn_width (the same in every layer)")
        elif model.layer_kv_heads(0) != model.heads[0]:
            problems.append("kv_heads (as many as heads)")
        elif model.attention_width(0) != model.d_model:
            problems.append("head_dim (d_model / heads)")
    return problems


def _bases(model: ModelConfig) -> list[float | None]:
    return [model.layer_base(layer) for layer in range(model.num_layers)]


def is_uniform(model: ModelConfig) -> bool:
    """Whether all layers have the same heads, key/value heads, head dim and feed-forward width, none 0."""
    layers = range(model.num_layers)
    shapes = {
        (model.heads[i], model.layer_kv_heads(i), model.layer_head_dim(i), model.layer_ffn_width(i))
        for i in layers
    }
    return len(shapes) == 1 and all(shapes.pop())


def choose_format(model: ModelConfig, wanted: Format | Literal["auto"]) -> Format:
    """Choose the format that the user asked for (or auto: a plain one whose weights are the model's own).

    Raises:
        UserError: the format cannot hold the model.
    """
    if wanted != "auto":
        if problems := explain_unsupported(model, wanted):
            raise UserError(
                f"format: {wanted!r} cannot hold this model: {', '.join(problems)}; valid: "
                f"{', '.join([*list_plain_formats(model), 'native'])} or auto"
            )
        return wanted
    for plain in FORMATS[1:]:
        divides = plain != "llama" or (model.heads[0] and model.d_model % model.heads[0] == 0)
        exact = is_uniform(model) and (plain not in PADDED or scaled_model(model) == model)
        if exact and divides and not explain_unsupported(model, plain):
            return plain
    return "native"


def list_plain_formats(model: ModelConfig) -> list[Format]:
    """The formats that hold the model, where need be with padding."""
    found = []
    for name in PADDED:
        if not explain_unsupported(model, name):
            with suppress(UserError):  # no head count divides the width of a Llama
                choose_padding(model, name)
                found.append(name)
    return found


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


def folder_shapes(model: ModelConfig, chosen: Format) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors by name, for a model that needs no padding."""
    ours, shapes = parameter_shapes(model), {}
    for name, sources in folder_tensors(model, chosen).items():
        shape = (sum(ours[source][0] for source in sources), *ours[sources[0]][1:])
        shapes[name] = shape[::-1] if is_transposed(name) else shape
    return shapes


def is_transposed(name: str) -> bool:
    """Whether a folder holds the tensor of this name as [in, out]; ours are [out, in]."""
    return _TRANSPOSED.fullmatch(name) is not None


# ---------------------------------------------------------------------- exports


def fold_divisor(parameters: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """The parameters of folded_model: the final norm is divided by *ratio*, not the logits."""
    return {
        name: value / ratio if ratio != 1 and name.startswith("final_norm.") else value
        for name, value in parameters.items()
    }


def folder_weights(model: ModelConfig, chosen: Format, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the folder of *model* in the chosen format, by their names there.

    Args:
        parameters: ours by name, without padded vocabulary rows; for llama and qwen3 those of folded_model.
    """
    if chosen in LLAMA_LIKE:
        like = next(iter(parameters.values()))
        weights = {}
        for name, shape in parameter_shapes(padded_model(model, chosen)).items():
            norm = _QK_NORM.fullmatch(name)
            if name in parameters:
                value = pad_parameter(model, chosen, name, parameters[name])
            elif norm and model.heads[layer := int(norm[1])]:  # norms without weights
                value = pad_parameter(model, chosen, name, like.new_ones(model.layer_head_dim(layer)))
            else:  # of a part that the layer lacks
                value = like.new_full(shape, float(name.endswith("_norm.weight")))
            weights[folder_name(name, chosen)] = value
        return weights
    weights = {}
    for name, sources in folder_tensors(model, chosen).items():
        parts = [parameters[source] for source in sources]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        weights[name] = tensor.t().contiguous() if is_transposed(name) else tensor
    return weights


def folder_config(model: ModelConfig, chosen: Format, extra: dict[str, Any]) -> Any:
    """The transformers configuration of *model* in the format; *extra*: more of its fields.

    Raises:
        UserError: llama or qwen3, and no uniform shape holds the layers.
    """
    import transformers

    settings: dict[str, Any] = {
        **extra,
        "architectures": [(CLASSIFIERS if model.classes else ARCHITECTURES)[chosen]],
    }
    for name, names in SETTINGS.items():
        if (theirs := names[chosen]) is not None:
            value = getattr(model, name)
            translation = VALUES.get((name, chosen))
            if translation is not None:
                value = next(their for their, our in translation.items() if our == value)
            settings[theirs] = to_dict(value)
    layers = range(model.num_layers)
    if chosen == "gpt2":
        return transformers.GPT2Config(
            n_layer=model.num_layers,
            n_head=model.heads[0],
            # Trained without dropout; GPT-2's own default is 0.1.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # The old name of n_positions: llama.cpp's converter reads no other.
            **settings | {"n_ctx": model.context_length},
        )
    if chosen in LLAMA_LIKE:
        settings["rope_theta"] = next(filter(None, _bases(model)), 10000.0)
    windows = [model.layer_window(layer) for layer in layers]
    usual = mode(window for window in windows[::-1] if window) if any(windows) else None
    kinds = [_SLIDING if window else "full_attention" for window in windows]
    if chosen in LLAMA_LIKE:
        if model.rope_scaling is not None:
            given, kind = to_dict(model.rope_scaling), model.rope_scaling.type
            named = {
                theirs: given[ours] for ours, theirs in ROPE_TYPES[kind].items() if given[ours] is not None
            }
            rope = {"rope_type": kind, "rope_theta": settings.pop("rope_theta"), **named}
            settings["rope_parameters"] = rope
        padding = choose_padding(model, chosen)
        if chosen in ("qwen2", "qwen3", "smollm3"):
            settings |= {"use_sliding_window": usual is not None, "sliding_window": usual}
            settings |= {"layer_types": kinds}
        if chosen in ("qwen2", "qwen3"):
            settings |= {"max_window_layers": [*kinds, _SLIDING].index(_SLIDING)}
        if chosen == "mistral":
            settings["sliding_window"] = usual
        if chosen == "smollm3":
            settings["no_rope_layers"] = [int(base is not None) for base in _bases(model)]
        return getattr(transformers, ARCHITECTURES[chosen]).config_class(
            num_hidden_layers=model.num_layers,
            num_attention_heads=padding.heads,
            num_key_value_heads=padding.kv_heads,
            head_dim=padding.head_dim,
            **settings | {"intermediate_size": padding.ffn_width},
        )
    schedules: dict[str, list[Any]] = {
        "num_attention_heads": list(model.heads),
        "num_key_value_heads": [model.layer_kv_heads(layer) for layer in layers],
        "head_dim": [model.layer_head_dim(layer) for layer in layers],
        "intermediate_size": list(model.ffn_widths),
    }
    del settings["intermediate_size"]
    if any(windows):  # layers of full attention do not read theirs
        schedules["sliding_window"] = [window or usual for window in windows]
    if any(len(set(values)) > 1 for values in schedules.values()):
        # transformers leaves out what equals the common values.
        settings["per_layer_config"] = {
            layer: {name: values[layer] for name, values in schedules.items()} for layer in layers
        }
    if settings["rope_theta"] is None:  # transformers would take its own default
        settings["rope_theta"] = [None] * model.num_layers
    config = HeadScheduleConfig(
        num_hidden_layers=model.num_layers,
        layer_types=kinds,
        **{name: mode(values[::-1]) for name, values in schedules.items()},
        **settings,
    )
    config.auto_map = {
        "AutoConfig": "configuration_head_schedule.HeadScheduleConfig",
        "AutoModel": "modeling_head_schedule.HeadScheduleModel",
    } | {f"AutoModel{kind}": f"modeling_head_schedule.HeadSchedule{kind}" for kind in AUTO_CLASSES}
    return config
