"""Configuration of a decoder whose layers have their own numbers of attention heads.

This file is shipped with exported checkpoints and must not import anything but transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen3Config


class HeadScheduleConfig(PreTrainedConfig):
    """A pre-norm decoder with per-layer head counts, head dims and attention windows.

    What differs between layers is in the official ``per_layer_config`` (transformers >= 5.15): read
    ``config.per_layer_config[i].num_attention_heads``, never ``config.num_attention_heads``, which raises
    when it is not the same for all layers.
    """

    model_type = "head_schedule"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (the base class's form)
    # Whole heads go to each rank, so the degree must divide every layer's head counts.
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    block_width: int | list[int] | None = None
    """How many coordinates of the residual stream layers read and write, the first ones, all layers or each;
    hidden_size when not given. The stream has the largest of them and hidden_size coordinates."""
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    """As many as num_attention_heads when not given."""
    head_dim: int | None = None
    """Width of one head; hidden_size / num_attention_heads when not given."""
    max_position_embeddings: int = 1024
    feed_forward: str = "swiglu"
    """swiglu: down(act(gate(x)) * up(x)); mlp: down(act(up(x)))."""
    hidden_act: str = "silu"
    norm: str = "rmsnorm"
    """rmsnorm or layernorm."""
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: str = "none"
    """none; output: the output projection has a bias; qkv: q, k and v have one; all: all four."""
    mlp_bias: bool = False
    positions: str = "rope"
    """rope (rotate-half pairs, as Llama) or learned (an embedding of the position)."""
    rope_theta: float | list[float | None] = 10000.0
    """Base of the rotary wavelengths, of all layers or of each; null: the layer has no positions."""
    partial_rotary: float | list[float] = 1.0
    """Share of a head's dims that is rotated, from the first on, of all layers or of each."""
    rotary_scaling: dict[str, Any] | None = None
    """Longer wavelengths: type (llama3, linear or yarn), factor, and what else the type needs."""
    qk_norm: str = "none"
    """RMS norm of every query and key head, before the rotation: none, plain, or weighted."""
    attention_gate: str = "none"
    """Sigmoid gates on the output of attention before its projection, computed from what q reads: none, head
    (one a head) or element."""
    attention_scale: str = "sqrt_head_dim"
    """Factor on the logits, with d_h the layer's own head dim and b attention_scale_base: sqrt_head_dim,
    1/sqrt(d_h); head_dim, sqrt(b)/d_h; constant, 1/sqrt(b); none, 1."""
    attention_scale_base: float | None = None
    logit_scale: float | None = None
    """Factor on the logits, before the soft cap; base_width / hidden_size (1 without a base_width) when not
    given. Named as in Cohere's models; Granite's logits_scaling is a divisor."""
    final_logit_softcapping: float | None = None
    """c: logits x become c tanh(x / c). Named as in Gemma 2."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the training loss. The forward pass does not read
    it."""
    parametrization: str = "standard"
    """How the model was trained, standard or mup. The forward pass does not read it."""
    base_width: int | None = None
    """The width whose learning rates a model in mup was trained with. The forward pass does not read it."""
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    """Positions a query of a ``sliding_attention`` layer sees, itself included."""
    layer_types: list[str] | None = None
    """full_attention or sliding_attention for each layer; all full when not given."""
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.logit_scale is None:
            self.logit_scale = self.base_width / self.hidden_size if self.base_width else 1.0
        absent = {"self_attn.g_proj"} if self.attention_gate == "none" else set()
        absent |= {"mlp.gate_proj"} if self.feed_forward == "mlp" else set()
        self.base_model_tp_plan = {
            name: plan
            for name, plan in type(self).base_model_tp_plan.items()
            if name.removeprefix("layers.*.") not in absent
        }
        # Each rank's heads give a part of the gradient of these weights. Older versions have no name for it.
        style = (Qwen3Config.base_model_tp_plan or {}).get("layers.*.self_attn.q_norm")
        if self.qk_norm == "weighted" and style is not None:
            for part in ("q_norm", "k_norm"):
                self.base_model_tp_plan[f"layers.*.self_attn.{part}"] = style
        super().__post_init__(**kwargs)


def block_width(config: HeadScheduleConfig, layer_idx: int) -> int:
    """How many coordinates of the residual stream the layer reads and writes."""
    width = config.block_width
    return (width[layer_idx] if isinstance(width, list) else width) or config.hidden_size


def layer_rotary(config: HeadScheduleConfig, layer_idx: int) -> tuple[int, float] | None:
    """Dims of a head that the layer rotates, and their base; None if it rotates none."""

    def own(value: Any) -> Any:
        return value[layer_idx] if isinstance(value, list) else value

    layer, base = config.per_layer_config[layer_idx], own(config.rope_theta)
    if config.positions != "rope" or base is None or not layer.num_attention_heads:
        return None
    return round(own(config.partial_rotary) * layer.head_dim), float(base)


def layer_window(config: HeadScheduleConfig, layer_idx: int) -> int | None:
    """Positions that a query of the layer sees, itself included; None: all before it."""
    sliding = (config.layer_types or [])[layer_idx] == "sliding_attention"
    return config.per_layer_config[layer_idx].sliding_window if sliding else None


__all__ = ["HeadScheduleConfig"]
