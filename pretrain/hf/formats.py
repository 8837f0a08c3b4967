"""Plans a model's Hugging Face folder: its configuration, and how each tensor is made from ours.

Three formats: ``native`` (the architecture shipped beside this file, any model), ``llama`` (transformers' own
LlamaForCausalLM, zero-padded where layers differ) and ``gpt2`` (its GPT2LMHeadModel). The last two need no remote code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import parameter_specs

Format = Literal["native", "llama", "gpt2"]

# Our activations by transformers' names, and back. gelu_new is the formula that GPT-2's configurations name.
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
GPT2_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}

_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_OUTER = {
    "token_embedding": "model.embed_tokens",
    "position_embedding": "model.embed_positions",
    "final_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of the written folder."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of our parameters that it is made from."""
    build: Callable[..., Tensor]
    """(each source, vocabulary rows unpadded) -> the tensor."""


@dataclass(frozen=True)
class Export:
    """A plan of a folder's contents. Its weights are built from *tensors* one at a time."""

    format: Format
    config: Any
    """The transformers configuration."""
    tensors: list[ExportedTensor]
    notes: list[str] = field(default_factory=list)
    """Lines to print: what the format costs."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our parameters' names and shapes without padded vocabulary rows, in the order of named_parameters."""
    return {
        name: (model.vocab_size, *spec.shape[1:]) if spec.vocabulary else spec.shape
        for name, spec in parameter_specs(model).items()
    }


def llama_name(name: str) -> str:
    """The name that our parameter has in native and Llama folders."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        part, kind = rest.rsplit(".", 1)
        return f"model.layers.{layer}.{_PARTS[part]}.{kind}"
    part, kind = name.rsplit(".", 1)
    return f"{_OUTER[part]}.{kind}"


# ---------------------------------------------------------------------- which format


def why_not_llama(model: ModelConfig) -> list[str]:
    """The settings that LlamaForCausalLM does not support, as ``field 'value' (needed)``; empty if it fits."""
    valid_values: dict[str, tuple[Any, ...]] = {
        "ffn": ("swiglu",),
        "norm": ("rmsnorm",),
        "norm_bias": (False,),
        "attention_bias": ("none", "all"),
        "positions": ("rope",),
        "attention_scale": ("sqrt_head_dim",),
    }
    problems = _differences(model, valid_values)
    if any(window is not None for window in model.local_window or ()):
        problems.append("local_window (no window)")
    return problems


def why_not_gpt2(model: ModelConfig) -> list[str]:
    """Like :func:`why_not_llama`, for GPT2LMHeadModel."""
    valid_values: dict[str, tuple[Any, ...]] = {
        "ffn": ("mlp",),
        "norm": ("layernorm",),
        "norm_bias": (True,),
        "attention_bias": ("all",),
        "ffn_bias": (True,),
        "positions": ("learned",),
    }
    problems = _differences(model, valid_values)
    if any(window is not None for window in model.local_window or ()):
        problems.append("local_window (no window)")
    if not is_uniform(model):
        problems.append("heads (the same in every layer)")
    elif model.layer_kv_heads(0) != model.heads[0]:
        problems.append("kv_heads (as many as heads)")
    elif model.attention_width(0) != model.d_model:
        problems.append("head_dim (d_model / heads)")
    return problems


def _differences(model: ModelConfig, valid_values: dict[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{name} {getattr(model, name)!r} ({' or '.join(map(repr, valid))})"
        for name, valid in valid_values.items()
        if getattr(model, name) not in valid
    ]


def is_uniform(model: ModelConfig) -> bool:
    """Whether all layers have the same heads, key/value heads and head dim."""
    layers = range(model.num_layers)
    shapes = {(model.heads[i], model.layer_kv_heads(i), model.layer_head_dim(i)) for i in layers}
    return len(shapes) == 1


def choose_format(model: ModelConfig, wanted: str) -> Format:
    """Choose native, llama or gpt2 as the user asked (or auto: llama or gpt2 where nothing needs padding).

    Raises:
        UserError: the format cannot hold the model.
    """
    if wanted == "native":
        return "native"
    if wanted == "llama":
        if problems := why_not_llama(model):
            raise UserError(
                f"format: 'llama' cannot hold this model: {', '.join(problems)}; valid: native or auto"
            )
        return "llama"
    if not why_not_gpt2(model):
        return "gpt2"
    plain = is_uniform(model) and not why_not_llama(model) and model.d_model % model.heads[0] == 0
    return "llama" if plain else "native"


def plan_export(model: ModelConfig, chosen: Format, token_ids: dict[str, int], dtype: torch.dtype) -> Export:
    """Plan the folder of *model* in the chosen format.

    Args:
        token_ids: bos_token_id, eos_token_id, pad_token_id.
        dtype: dtype of the written weights.
    """
    build = {"native": _native, "llama": _llama, "gpt2": _gpt2}[chosen]
    export = build(model, {**token_ids, "dtype": dtype})
    export.config.architectures = [
        {"native": "HeadScheduleForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[chosen]
    ]
    return export


# ---------------------------------------------------------------------- native


def native_config(model: ModelConfig, extra: dict[str, Any]) -> Any:
    """The HeadScheduleConfig of *model*."""
    from pretrain.hf.configuration_head_schedule import HeadScheduleConfig

    layers = range(model.num_layers)
    return HeadScheduleConfig.from_layers(
        heads=list(model.heads),
        kv_heads=[model.layer_kv_heads(layer) for layer in layers],
        head_dims=[model.layer_head_dim(layer) for layer in layers],
        windows=[model.layer_window(layer) for layer in layers],
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        intermediate_size=model.ffn_width,
        max_position_embeddings=model.context_length,
        feed_forward=model.ffn,
        hidden_act=ACTIVATIONS[model.activation],
        norm=model.norm,
        norm_eps=model.norm_eps,
        norm_bias=model.norm_bias,
        attention_bias=model.attention_bias,
        mlp_bias=model.ffn_bias,
        positions=model.positions,
        rope_theta=float(model.rope_base),
        attention_scale=model.attention_scale,
        initializer_range=model.init_std,
        tie_word_embeddings=model.tie_embeddings,
        **extra,
    )


def _native(model: ModelConfig, extra: dict[str, Any]) -> Export:
    config = native_config(model, extra)
    config.auto_map = {
        "AutoConfig": "configuration_head_schedule.HeadScheduleConfig",
        "AutoModel": "modeling_head_schedule.HeadScheduleModel",
        "AutoModelForCausalLM": "modeling_head_schedule.HeadScheduleForCausalLM",
    }
    return Export("native", config, list(_renamed(model)))


def _renamed(model: ModelConfig) -> Iterator[ExportedTensor]:
    for name, shape in parameter_shapes(model).items():
        yield ExportedTensor(llama_name(name), shape, (name,), _identity)


# ---------------------------------------------------------------------- llama, padded where layers differ


@dataclass(frozen=True)
class Padding:
    """The uniform shape into which every layer's attention fits."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads


def padding_for(model: ModelConfig) -> Padding:
    """The smallest uniform heads, key/value heads and head dim that hold every layer of *model*.

    Head dim: the least common multiple, because rotary frequency 2j/d_h must be one of 2i/D. Llama's configuration
    requires that heads divide d_model.

    Raises:
        UserError: no such shape exists.
    """
    layers = range(model.num_layers)
    head_dims = {model.layer_head_dim(layer) for layer in layers}
    # rotary pairs: D/2 must hold j * D/d_h, which it does for any common multiple of even head dims
    head_dim = math.lcm(*head_dims)
    group = max(model.heads[layer] // model.layer_kv_heads(layer) for layer in layers)
    needed = max(model.layer_kv_heads(layer) for layer in layers)
    for kv_heads in range(needed, model.d_model // group + 1):
        if model.d_model % (kv_heads * group) == 0:
            return Padding(kv_heads * group, kv_heads, head_dim)
    raise UserError(
        f"format: 'llama' needs a head count of at least {needed * group} that divides d_model {model.d_model} and "
        f"is a multiple of {group}; there is none; valid: native"
    )


def _llama(model: ModelConfig, extra: dict[str, Any]) -> Export:
    from transformers import LlamaConfig

    padding = padding_for(model)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.d_model,
        intermediate_size=model.ffn_width,
        num_hidden_layers=model.num_layers,
        num_attention_heads=padding.heads,
        num_key_value_heads=padding.kv_heads,
        head_dim=padding.head_dim,
        hidden_act=ACTIVATIONS[model.activation],
        max_position_embeddings=model.context_length,
        initializer_range=model.init_std,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rope_base)},
        attention_bias=model.attention_bias == "all",
        mlp_bias=model.ffn_bias,
        **extra,
    )
    tensors = []
    for tensor in _renamed(model):
        part = tensor.sources[0].split(".")
        if part[0] == "layers" and part[2] == "attention" and not tensor.name.endswith("o_proj.bias"):
            tensor = _pad_attention(model, tensor, int(part[1]), part[3], padding)
        tensors.append(tensor)
    return Export("llama", config, tensors, padding_cost(model, padding))


def _pad_attention(
    model: ModelConfig, tensor: ExportedTensor, layer: int, part: str, padding: Padding
) -> ExportedTensor:
    """The tensor with each head at its place in the padded layer; unchanged if the layer has that shape."""
    heads, kv_heads, head_dim = model.heads[layer], model.layer_kv_heads(layer), model.layer_head_dim(layer)
    if Padding(heads, kv_heads, head_dim) == padding:
        return tensor
    if part in "kv":
        places = torch.arange(kv_heads)
        padded_heads = padding.kv_heads
    else:  # the j-th query head of key/value head k
        layer_group = heads // kv_heads
        places = (torch.arange(kv_heads)[:, None] * padding.group + torch.arange(layer_group)).flatten()
        padded_heads = padding.heads
    if part in "qk":  # pair j of d_h turns by 2j/d_h: the padded pair with that frequency is j * D/d_h
        first = torch.arange(head_dim // 2) * (padding.head_dim // head_dim)
        columns = torch.cat([first, first + padding.head_dim // 2])
    else:
        columns = torch.arange(head_dim)
    rows = (places[:, None] * padding.head_dim + columns).flatten()  # [h * d_h]
    width = padded_heads * padding.head_dim
    # Llama divides the logits by sqrt(D), not by the layer's own sqrt(d_h).
    scale = math.sqrt(padding.head_dim / head_dim) if part == "q" else 1.0
    dim = 1 if part == "o" else 0
    shape = tuple(width if axis == dim else size for axis, size in enumerate(tensor.shape))

    def build(source: Tensor) -> Tensor:
        return torch.zeros(shape, dtype=source.dtype).index_copy_(dim, rows, source * scale)

    return dataclasses.replace(tensor, shape=shape, build=build)


def padding_cost(model: ModelConfig, padding: Padding) -> list[str]:
    """What the padding costs, in lines to print; empty when no layer is padded."""
    layers = range(model.num_layers)
    width, kv_width = padding.heads * padding.head_dim, padding.kv_heads * padding.head_dim
    unpadded = sum(model.attention_width(layer) for layer in layers)
    unpadded_kv = sum(model.kv_width(layer) for layer in layers)
    if unpadded == width * model.num_layers and unpadded_kv == kv_width * model.num_layers:
        return []
    extra = 2 * model.d_model * (model.num_layers * (width + kv_width) - unpadded - unpadded_kv)
    parameters = model.num_parameters()
    return [
        f"padded to {padding.heads} heads ({padding.kv_heads} key/value) of dim {padding.head_dim} in every layer",
        f"  attention width, all layers   {unpadded:,} -> {width * model.num_layers:,} "
        f"({width * model.num_layers / unpadded:.2f}x)",
        f"  KV cache, values per token    {2 * unpadded_kv:,} -> {2 * kv_width * model.num_layers:,} "
        f"({kv_width * model.num_layers / unpadded_kv:.2f}x)",
        f"  parameters                    {parameters:,} -> {parameters + extra:,} "
        f"({(parameters + extra) / parameters:.2f}x)",
    ]


# ---------------------------------------------------------------------- gpt2


def _gpt2(model: ModelConfig, extra: dict[str, Any]) -> Export:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.context_length,
        n_embd=model.d_model,
        n_layer=model.num_layers,
        n_head=model.heads[0],
        n_inner=model.ffn_width,
        activation_function=GPT2_ACTIVATIONS[model.activation],
        layer_norm_epsilon=model.norm_eps,
        initializer_range=model.init_std,
        scale_attn_weights=model.attention_scale == "sqrt_head_dim",
        tie_word_embeddings=model.tie_embeddings,
        # Trained without dropout; GPT-2's own default is 0.1.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # The old name of n_positions: llama.cpp's converter reads no other.
        **(extra | {"n_ctx": model.context_length}),
    )
    shapes = parameter_shapes(model)
    tensors = []
    for name, sources in gpt2_sources(model).items():
        conv = name.endswith(".weight") and name.rsplit(".", 2)[-2] in ("c_attn", "c_proj", "c_fc")
        build = _joined_transposed if conv else _joined
        with torch.device("meta"):
            shape = tuple(build(*(torch.empty(shapes[source]) for source in sources)).shape)
        tensors.append(ExportedTensor(name, shape, sources, build))
    return Export("gpt2", config, tensors)


def gpt2_sources(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """GPT-2's tensor names, each with our parameters that it holds (q, k and v are joined)."""
    sources: dict[str, tuple[str, ...]] = {
        "transformer.wte.weight": ("token_embedding.weight",),
        "transformer.wpe.weight": ("position_embedding.weight",),
    }
    parts: dict[str, Sequence[str]] = {
        "ln_1": ["attention_norm"],
        "attn.c_attn": ["attention.q", "attention.k", "attention.v"],
        "attn.c_proj": ["attention.o"],
        "ln_2": ["ffn_norm"],
        "mlp.c_fc": ["ffn.up"],
        "mlp.c_proj": ["ffn.down"],
    }
    for layer in range(model.num_layers):
        for gpt2_part, our_parts in parts.items():
            for kind in ("weight", "bias"):
                names = tuple(f"layers.{layer}.{part}.{kind}" for part in our_parts)
                sources[f"transformer.h.{layer}.{gpt2_part}.{kind}"] = names
    for kind in ("weight", "bias"):
        sources[f"transformer.ln_f.{kind}"] = (f"final_norm.{kind}",)
    if not model.tie_embeddings:
        sources["lm_head.weight"] = ("output.weight",)
    return sources


def _joined(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined_transposed(*parts: Tensor) -> Tensor:
    # GPT-2's Conv1D holds [in, out]
    return _joined(*parts).t().contiguous()
