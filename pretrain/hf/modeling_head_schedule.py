"""A decoder whose layers have their own numbers of attention heads, for transformers.

This file is shipped with exported checkpoints and must not import anything but torch and transformers.
Parameter names are Llama's, so that tools which look for ``q_proj`` or ``down_proj`` (LoRA, quantization,
tensor-parallel plans) find them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_head_schedule import HeadScheduleConfig, block_width, layer_rotary, layer_window
from .rotary_head_schedule import HeadScheduleRotaryEmbedding, Rotation

# What transformers calls a cache in arguments and outputs: "cache" since 5.24. Before, that name is the paged
# cache's of continuous batching, which is passed on to the attention function.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def take_cache(kwargs: dict[str, Any], past_key_values: Cache | None = None) -> Cache | None:
    """The cache of a call, removed from *kwargs* if it is there.

    Raises TypeError for two caches, or one under an unknown name: text generated without it would be wrong.
    """
    cache = kwargs.pop(CACHE_NAME, None)
    others = [name for name, value in kwargs.items() if isinstance(value, Cache)]
    if cache is not None and past_key_values is not None:
        others.append("past_key_values")
    if others:
        unknown = f"{others[0]}: this code does not expect a cache under that name"
        raise TypeError(f"{unknown}: pass one cache, as {CACHE_NAME}, or use an older transformers")
    return past_key_values if cache is None else cache


class HeadScheduleBiasedNorm(nn.RMSNorm):
    """RMSNorm with a bias. Its name does not end in RMSNorm, which servers replace by one without."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return super().forward(hidden_states) + self.bias


def build_norm(config: HeadScheduleConfig, width: int) -> nn.Module:
    """The norm that the configuration asks for, over *width* coordinates."""
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    kind = HeadScheduleBiasedNorm if config.norm_bias else nn.RMSNorm
    return kind(width, eps=config.norm_eps)


class HeadScheduleAttention(nn.Module):
    """Causal attention with the layer's own head count, head dim and window."""

    def __init__(self, config: HeadScheduleConfig, layer_idx: int) -> None:
        super().__init__()
        layer = config.per_layer_config[layer_idx]
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = layer.head_dim
        self.num_key_value_groups = layer.num_attention_heads // layer.num_key_value_heads
        base = math.sqrt(config.attention_scale_base or 1)
        scales = {"head_dim": base / self.head_dim, "constant": 1 / base, "none": 1.0}
        self.scaling = scales.get(config.attention_scale, self.head_dim**-0.5)
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = layer_window(config, layer_idx)
        hidden = block_width(config, layer_idx)
        width = layer.num_attention_heads * self.head_dim
        kv_width = layer.num_key_value_heads * self.head_dim
        qkv_bias = config.attention_bias in ("qkv", "all")
        self.q_proj = nn.Linear(hidden, width, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, hidden, bias=config.attention_bias in ("output", "all"))
        self.gated = config.attention_gate
        if self.gated != "none":
            gates = width if self.gated == "element" else layer.num_attention_heads
            self.g_proj = nn.Linear(hidden, gates, bias=False)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm != "none":
            weighted = {"elementwise_affine": config.qk_norm == "weighted"}
            self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps, **weighted)
            self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps, **weighted)

    def forward(
        self,
        hidden_states: Tensor,
        rotation: Rotation | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, T, d] -> output [B, T, d] and, with eager attention, weights [B, h, T, S]."""
        batch, length = hidden_states.shape[:2]
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if query.shape[-1] % self.head_dim or key.shape[-1] % self.head_dim:
            raise ValueError(f"tensor parallelism: the ranks must divide the heads of layer {self.layer_idx}")
        # -1: under tensor parallelism a rank has some of the heads
        shape = (batch, length, -1, self.head_dim)
        query, key = query.view(shape), key.view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = query.transpose(1, 2)  # [B, h, T, d_h]
        key = key.transpose(1, 2)  # [B, kv, T, d_h]
        value = value.view(shape).transpose(1, 2)
        if rotation is not None:
            query, key = self.rotate(query, key, rotation, value.dtype)
        if past_key_values is not None:
            # kwargs: a paged cache reads and changes what the attention function gets
            key, value = past_key_values.update(key, value, self.layer_idx, kwargs=kwargs)
        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            *(self, query, key, value, attention_mask),
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        output = output.reshape(batch, length, -1).contiguous()
        if self.gated == "element":
            output = output * self.g_proj(hidden_states).sigmoid()
        elif self.gated == "head":
            gates = self.g_proj(hidden_states).sigmoid()[..., None]
            output = (output.unflatten(-1, (-1, self.head_dim)) * gates).flatten(-2)
        return self.o_proj(output), weights

    def rotate(
        self, query: Tensor, key: Tensor, rotation: Rotation, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Queries and keys [B, heads, T, d_h] with the first dims of each head rotated by their positions."""
        dims = rotation[0].shape[-1]
        turned = apply_rotary_pos_emb(query[..., :dims], key[..., :dims], *rotation)
        if dims == self.head_dim:
            return tuple(x.to(dtype) for x in turned)
        pairs = zip(turned, (query, key), strict=True)
        return tuple(torch.cat((x.to(dtype), whole[..., dims:]), dim=-1) for x, whole in pairs)


class HeadScheduleMLP(nn.Module):
    """Gated (swiglu) or plain (mlp) feed-forward network."""

    def __init__(self, config: HeadScheduleConfig, layer_idx: int) -> None:
        super().__init__()
        self.gated = config.feed_forward == "swiglu"
        inner = config.per_layer_config[layer_idx].intermediate_size
        width, bias = block_width(config, layer_idx), config.mlp_bias
        if self.gated:
            self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        up = self.up_proj(hidden_states)
        return self.down_proj(
            self.act_fn(self.gate_proj(hidden_states)) * up if self.gated else self.act_fn(up)
        )


class HeadScheduleDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); without one of both in layers that lack it. x is the
    first *width* coordinates of the residual stream, the others stay."""

    def __init__(self, config: HeadScheduleConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.width = block_width(config, layer_idx)
        layer = config.per_layer_config[layer_idx]
        self.self_attn: HeadScheduleAttention | None = None
        self.mlp: HeadScheduleMLP | None = None
        if layer.num_attention_heads:
            self.self_attn = HeadScheduleAttention(config, layer_idx)
            self.input_layernorm = build_norm(config, self.width)
        if layer.intermediate_size:
            self.mlp = HeadScheduleMLP(config, layer_idx)
            self.post_attention_layernorm = build_norm(config, self.width)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """The residual stream [B, T, d] -> [B, T, d]; the other arguments go to the attention."""
        hidden_states, rest = hidden_states[..., : self.width], hidden_states[..., self.width :]
        cache = kwargs.pop(CACHE_NAME, None)
        if self.self_attn is not None:
            normed = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(normed, past_key_values=cache, **kwargs)
            hidden_states = hidden_states + attended
        elif cache is not None:
            # One number a token: the cache counts its tokens in layer 0, and keys of no width as none.
            # A quantized cache takes whole groups of numbers only.
            group = getattr(cache.layers[0], "q_group_size", 1) if cache.layers else 1
            unread = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], group)
            cache.update(unread, unread, self.layer_idx)
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return torch.cat((hidden_states, rest), dim=-1) if rest.shape[-1] else hidden_states


def create_masks(
    config: HeadScheduleConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> dict[int | None, Any]:
    """The masks of all layers by their window, in the form that the attention implementation wants."""
    cache = {CACHE_NAME: take_cache(kwargs)}
    masks: dict[int | None, Any] = {}
    for layer_idx, layer in enumerate(config.per_layer_config):
        window = layer_window(config, layer_idx)
        if window not in masks:
            create = create_causal_mask if window is None else create_sliding_window_causal_mask
            masks[window] = create(
                config=layer,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                layer_idx=layer_idx,
                **cache,
            )
    return masks


class HeadSchedulePreTrainedModel(PreTrainedModel):
    """What the models below share."""

    config_class = HeadScheduleConfig
    config: HeadScheduleConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeadScheduleDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": HeadScheduleDecoderLayer,
        "attentions": HeadScheduleAttention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadScheduleRotaryEmbedding):
            for index, kind in enumerate(module.kinds):
                init.copy_(getattr(module, f"frequencies_{index}"), module.frequencies(*kind))


class HeadScheduleModel(HeadSchedulePreTrainedModel):
    """The decoder without its LM head."""

    def __init__(self, config: HeadScheduleConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        self.rotary_emb: HeadScheduleRotaryEmbedding | None = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        else:
            self.rotary_emb = HeadScheduleRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            HeadScheduleDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = build_norm(config, config.hidden_size)
        self.gradient_checkpointing = False
        # Not looked up in self.layers: a server's pipeline leaves those of other ranks out.
        self.rotaries = [layer_rotary(config, layer) for layer in range(config.num_hidden_layers)]
        self.windows = [layer_window(config, layer) for layer in range(config.num_hidden_layers)]
        widths = [block_width(config, layer) for layer in range(config.num_hidden_layers)]
        self.added = max(0, max(widths) - config.hidden_size)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[int | None, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Token ids [B, T] (or their embeddings [B, T, d]) -> last hidden states [B, T, d].

        attention_mask [B, positions so far], 0 where padded on the left. Without position_ids, positions are
        counted from each sequence's first real token. The cache may have its newer name, "cache".
        """
        cache = take_cache(kwargs, past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = self._positions(inputs_embeds, attention_mask, cache)

        hidden_states = inputs_embeds
        rotations: dict[tuple[int, float] | None, Rotation] = {}
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(position_ids)
        elif self.rotary_emb is not None:
            rotations = self.rotary_emb(position_ids)
        if self.added:
            hidden_states = F.pad(hidden_states, (0, self.added))
        if isinstance(attention_mask, dict):  # made beforehand by generate(), for compiled decoding
            masks = attention_mask
        else:
            masks = create_masks(
                self.config, inputs_embeds, attention_mask, position_ids, **{CACHE_NAME: cache}
            )
        for layer, block in enumerate(self.layers):
            hidden_states = block(
                hidden_states,
                rotation=rotations.get(self.rotaries[layer]),
                attention_mask=masks[self.windows[layer]],
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE_NAME: cache},
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states[..., : self.config.hidden_size]),
            **{CACHE_NAME: cache},
        )

    def _positions(self, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache | None) -> Tensor:
        """Position ids [B or 1, T] of the new tokens."""
        length = inputs_embeds.shape[1]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        return (torch.arange(length, device=inputs_embeds.device) + seen).unsqueeze(0)


def keep_positions(hidden_states: Tensor, kept: int | Tensor) -> Tensor:
    """Hidden states [B, T, d] of the last *kept* positions (0: all), at the indices *kept* ([n] or [B, n]),
    or where a boolean *kept* [B, T] is true, joined to [n, d]."""
    if isinstance(kept, int):
        return hidden_states[:, -kept:]
    if kept.ndim == 1:
        return hidden_states[:, kept]
    if kept.dtype == torch.bool:
        return hidden_states[kept]
    return hidden_states.take_along_dim(kept[..., None], dim=1)


class HeadScheduleForCausalLM(HeadSchedulePreTrainedModel, GenerationMixin):
    """The decoder with its LM head, which is the token embedding when ``tie_word_embeddings`` is set.

    The LM head is a plain linear layer, which tools may replace, resize or merge into: logit_scale and
    final_logit_softcapping of the configuration are applied here, as Cohere's and Gemma 2's models do.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012

    def __init__(self, config: HeadScheduleConfig) -> None:
        super().__init__(config)
        self.model = HeadScheduleModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(**kwargs: Any) -> dict[int | None, Any]:
        """What generate() calls to make the masks before a compiled forward pass."""
        return create_masks(**kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[int | None, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Token ids [B, T] -> logits [B, T, vocabulary]; with labels [B, T] (not shifted) also the mean loss.

        logits_to_keep is how many positions from the end get logits (0: all), or a tensor as keep_positions
        takes it.
        """
        cache = take_cache(kwargs, past_key_values)
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        scale, cap = self.config.logit_scale, self.config.final_logit_softcapping
        if scale is not None and scale != 1:
            # The training network divides what its LM head reads; a factor on the logits would round
            # differently.
            hidden_states = hidden_states / (1 / scale)
        logits = self.lm_head(hidden_states)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class HeadScheduleDecoderUser(HeadSchedulePreTrainedModel):
    """transformers' mixins below make the decoder with AutoModel, which must know it."""

    def __init__(self, config: HeadScheduleConfig) -> None:
        AutoModel.register(type(config), HeadScheduleModel, exist_ok=True)
        super().__init__(config)


class HeadScheduleForSequenceClassification(GenericForSequenceClassification, HeadScheduleDecoderUser):
    """A class for each sequence, read at its last token that is not padding."""


class HeadScheduleForTokenClassification(GenericForTokenClassification, HeadScheduleDecoderUser):
    """A class for each token."""


class HeadScheduleForQuestionAnswering(GenericForQuestionAnswering, HeadScheduleDecoderUser):
    """The first and the last token of an answer."""


__all__ = [
    "HeadScheduleForCausalLM",
    "HeadScheduleForQuestionAnswering",
    "HeadScheduleForSequenceClassification",
    "HeadScheduleForTokenClassification",
    "HeadScheduleModel",
    "HeadSchedulePreTrainedModel",
]
