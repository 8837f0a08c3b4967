"""ModelConfig: every switch of the network, shapes of layers, parameter and FLOP counts, JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from model.allocations import Allocation
from model.checks import check_model
from model.declared import NonNegativeFloat, PositiveFloat, declared, from_dict, to_dict
from model.errors import naming
from model.heads import draw_heads, format_heads
from model.schedules import (
    LARGEST_SIZE,
    Bases,
    BlockWidths,
    FeedForwardWidths,
    Repeated,
    RopeScaling,
    Schedule,
    Shares,
    Size,
    Windows,
    at_layer,
)

FeedForwardKind = Literal["swiglu", "mlp"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
NormKind = Literal["rmsnorm", "layernorm"]
AttentionBias = Literal["none", "output", "qkv", "all"]
Positions = Literal["rope", "learned"]
AttentionScale = Literal["sqrt_head_dim", "head_dim", "constant", "none"]
AttentionGate = Literal["none", "head", "element"]
QKNorm = Literal["none", "plain", "weighted"]
Parametrization = Literal["standard", "mup"]

# Vocabularies are padded to a multiple of lcm(VOCABULARY_MULTIPLE, t): fast matrix shapes, and the same
# padded size for every tensor-parallel degree t that is a power of two up to 128.
VOCABULARY_MULTIPLE = 128


@declared()
class ModelConfig:
    """A decoder language model. Layer l has h_l = heads[l] query heads; T is context_length, d is d_model.

    Raises UserError, naming the field and the nearest valid value, when the switches contradict each other.
    """

    vocab_size: Size
    """Number of real tokens; embedding rows are padded beyond it (see padded_vocab_size)."""
    context_length: Size
    """T: the longest sequence the model accepts, in tokens."""
    d_model: Size
    """d: width of the embeddings, of the LM head and, without block_width, of the residual stream."""
    heads: Schedule
    """The head schedule, one query-head count per layer; its length is the number of layers. 0 leaves a layer
    without attention."""
    ffn_width: FeedForwardWidths
    """Inner width of the feed-forward network: of every layer, or a width per layer, 0 where a layer has
    none; or an allocation by name, such as tapered(1024) (model/allocations.py)."""
    block_width: BlockWidths | None = None
    """w_l: the layer reads and writes the first w_l coordinates of the residual stream (arXiv 2606.18246);
    of all layers or of each, or an allocation such as waist(640). None is d. The stream has the largest of
    them and d coordinates. Those beyond d begin at 0, and the LM head reads the first d."""
    kv_heads: Repeated | None = None
    """Key/value heads, of all layers or of each, dividing the layer's heads; None is as many as heads (MHA).
    0 in a layer without attention."""
    head_dim: Repeated | None = None
    """Width of one head, of all layers or of each; None is w_l / h_l, so parameters and FLOPs do not depend
    on the schedule. Not read in a layer without attention."""
    ffn: FeedForwardKind = "swiglu"
    """swiglu: down(activation(gate(x)) * up(x)); mlp: down(activation(up(x)))."""
    activation: Activation = "silu"
    """Nonlinearity of the feed-forward network; gelu_tanh is GPT-2's approximation, relu2 is relu(x)²
    (arXiv 2109.08668)."""
    norm: NormKind = "rmsnorm"
    """Kind of every norm. The Prism paper does not name one; LLaMA's is our choice."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance (mean square for rmsnorm) before the root."""
    norm_bias: bool = False
    """Whether norms have a bias next to their weight (either kind)."""
    attention_bias: AttentionBias = "none"
    """Biases of the attention projections: none, the output projection only (GPT-Neo), q, k and v only
    (Qwen2), or all four."""
    ffn_bias: bool = False
    """Whether the feed-forward projections have biases."""
    positions: Positions = "rope"
    """rope rotates q and k (RoFormer, arXiv 2104.09864); learned adds an embedding of the position."""
    rope_base: Bases = 10000.0
    """Base of the rotary wavelengths, of all layers or of each; null is no positions (NoPE).
    Unused with learned positions. Not given by the Prism paper."""
    rotary_share: Shares = 1.0
    """Which share of a head's dims is rotated, from the first on, of all layers or of each (partial rotary:
    GPT-NeoX); an even number of dims. Unused with learned positions."""
    rope_scaling: RopeScaling | None = None
    """Longer rotary wavelengths: llama3, linear or yarn; None leaves them as they are."""
    qk_norm: QKNorm = "none"
    """RMS norm of every query and key head, before the rotation (arXiv 2302.05442): with one weight [d_h] for
    the queries and one for the keys of a layer (weighted, as in Qwen3), or without (plain)."""
    attention_scale: AttentionScale = "sqrt_head_dim"
    """Factor on the attention logits of layer l: 1/sqrt(d_h(l)); sqrt(b)/d_h(l) (head_dim: muP's, arXiv
    2203.03466, appendix B.1) or 1/sqrt(b) (constant) with b = attention_scale_base; or none (GPT-Neo)."""
    attention_scale_base: PositiveFloat | None = None
    """The head dim at which head_dim and constant equal sqrt_head_dim; only for these two."""
    attention_gate: AttentionGate = "none"
    """What multiplies the output of attention before its projection (arXiv 2505.06708): the sigmoid of a
    product of what q reads, one a head (head) or one an element (element). Its weights begin as those of q,
    so that gates begin near a half, as the paper's do."""
    logit_softcap: PositiveFloat | None = None
    """c: the LM head's logits x become c tanh(x / c) (Gemma 2, arXiv 2408.00118). None does not cap them."""
    z_loss: NonNegativeFloat = 0.0
    """Weight in the training loss of the mean of the squared log-sum-exp of the logits (PaLM, arXiv
    2204.02311); validation leaves it out."""
    local_window: Windows | None = None
    """How many positions a query sees, itself included, in all layers or in each; None means no limit."""
    tie_embeddings: bool = True
    """Whether the LM head is the token embedding."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the weights at the start; residual projections get init_std / sqrt(n), with n the
    number of them, 2L where every layer has attention and a feed-forward network."""
    parametrization: Parametrization = "standard"
    """With mup, a learning rate found at base_width suits every width (arXiv 2203.03466, table 8). With m =
    d_model / base_width (in a layer with a block_width, block_width / base_width), the blocks' matrices begin
    with init_std / sqrt(m) and learn at a lower rate (pretrain/optim/groups.py), and logits are divided by m.
    At m = 1 it equals standard."""
    base_width: Size | None = None
    """d_model of the narrow model whose rates are used; with mup only."""
    classes: Annotated[int, Field(ge=2, le=LARGEST_SIZE)] | None = None
    """Number of classes of a sequence classifier, whose head [classes, d] replaces the LM head. None is a
    language model."""

    def __post_init__(self) -> None:
        for name in ("ffn_width", "block_width"):
            if isinstance(allocation := getattr(self, name), Allocation):
                with naming(name, allocation.text):
                    object.__setattr__(self, name, allocation.widths(self.num_layers, self.d_model))
        for name in ("kv_heads", "head_dim", "local_window"):
            if (value := getattr(self, name)) is not None and len(value) == 1:
                # There are no key/value heads in a layer without attention.
                each = tuple(value[0] if heads or name != "kv_heads" else 0 for heads in self.heads)
                object.__setattr__(self, name, each)
        check_model(self)
        for name in ("ffn_width", "block_width", "rope_base", "rotary_share"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(set(value)) == 1:
                object.__setattr__(self, name, value[0])  # one form of one meaning
        if self.block_width == self.d_model:
            object.__setattr__(self, "block_width", None)

    # ------------------------------------------------------------------ shapes

    @property
    def num_layers(self) -> int:
        """L: the number of layers."""
        return len(self.heads)

    @property
    def width_ratio(self) -> float:
        """m = d_model / base_width with parametrization mup, else 1."""
        return self.d_model / self.base_width if self.base_width else 1.0

    def layer_width(self, layer: int) -> int:
        """w_l: how many coordinates of the residual stream the layer reads and writes."""
        return self.d_model if self.block_width is None else at_layer(self.block_width, layer)

    @property
    def block_widths(self) -> tuple[int, ...]:
        """w_l of every layer."""
        return tuple(self.layer_width(layer) for layer in range(self.num_layers))

    @property
    def stream_width(self) -> int:
        """Coordinates of the residual stream."""
        return max(self.d_model, *self.block_widths)

    def layer_ratio(self, layer: int) -> float:
        """m of the layer's matrices with parametrization mup, w_l / base_width, else 1."""
        return self.layer_width(layer) / self.base_width if self.base_width else 1.0

    def layer_head_dim(self, layer: int) -> int:
        """d_h(l): width of one head of the layer; 0 where it has no attention."""
        if not self.heads[layer]:
            return 0
        return (
            self.head_dim[layer]
            if self.head_dim is not None
            else self.layer_width(layer) // self.heads[layer]
        )

    def layer_ffn_width(self, layer: int) -> int:
        """F_l: inner width of the layer's feed-forward network; 0 where it has none."""
        return at_layer(self.ffn_width, layer)

    @property
    def ffn_widths(self) -> tuple[int, ...]:
        """F_l of every layer."""
        return tuple(self.layer_ffn_width(layer) for layer in range(self.num_layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention."""
        return tuple(layer for layer, heads in enumerate(self.heads) if heads)

    @property
    def residual_writes(self) -> int:
        """Number of modules that write into the residual stream: 2L less those that layers lack."""
        return sum(map(self.layer_writes, range(self.num_layers)))

    def layer_writes(self, layer: int) -> int:
        """Number of the layer's modules that write into the residual stream: of attention and FFN."""
        return (self.heads[layer] > 0) + (self.layer_ffn_width(layer) > 0)

    def layer_kv_heads(self, layer: int) -> int:
        """Number of key/value heads of the layer."""
        return self.kv_heads[layer] if self.kv_heads is not None else self.heads[layer]

    def layer_base(self, layer: int) -> float | None:
        """Base of the layer's rotary wavelengths; None where nothing is rotated."""
        if self.positions != "rope" or not self.heads[layer]:
            return None
        return at_layer(self.rope_base, layer)

    def layer_share(self, layer: int) -> float:
        """Share of a head's dims that the layer rotates, where it has a base."""
        return cast(float, at_layer(self.rotary_share, layer))

    def layer_rotary(self, layer: int) -> tuple[int, float] | None:
        """Dims of a head that the layer rotates, and the base of their wavelengths; None if it rotates
        none."""
        base = self.layer_base(layer)
        return None if base is None else (round(self.layer_share(layer) * self.layer_head_dim(layer)), base)

    @property
    def rotary_kinds(self) -> set[tuple[int, float]]:
        """Every layer_rotary that some layer has."""
        kinds = map(self.layer_rotary, range(self.num_layers))
        return {kind for kind in kinds if kind is not None}

    def layer_scale(self, layer: int) -> float | None:
        """The factor on the layer's attention logits; None is 1/sqrt(d_h)."""
        base = math.sqrt(self.attention_scale_base or 1)
        scales = {"head_dim": base / self.layer_head_dim(layer), "constant": 1 / base, "none": 1.0}
        return scales.get(self.attention_scale)

    def layer_window(self, layer: int) -> int | None:
        """How many positions a query of the layer sees, itself included; None is everything before it, and
        where the layer has no attention."""
        return self.local_window[layer] if self.local_window is not None and self.heads[layer] else None

    def attention_width(self, layer: int) -> int:
        """A_l = h_l * d_h(l): columns of q, rows of o; w_l unless head_dim is given."""
        return self.heads[layer] * self.layer_head_dim(layer)

    def gate_width(self, layer: int) -> int:
        """Gates of the layer's attention: rows of their matrix."""
        widths = {"head": self.heads[layer], "element": self.attention_width(layer)}
        return widths.get(self.attention_gate, 0)

    def kv_width(self, layer: int) -> int:
        """Columns of k and of v."""
        return self.layer_kv_heads(layer) * self.layer_head_dim(layer)

    @property
    def tied(self) -> bool:
        """Whether the LM head is the token embedding; never that of a classifier."""
        return self.tie_embeddings and self.classes is None

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of lcm(128, tensor_parallel).

        The rows beyond vocab_size are zero, take no part in the softmax and are not exported.
        """
        multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple

    # ------------------------------------------------------------------ counts

    def num_parameters(self, padded: bool = False) -> int:
        """Exact number of parameters.

        padded counts the zero rows of the embedding (and of an untied LM head) too. The Prism paper's
        counts do so: prism-757m has 756,819,456 with 50,304 rows ("756.8M"), but 756,747,264 with the
        50,257 rows that are trained. The others read the same either way: 124M 123,551,232 (padded
        123,587,328), 354M 353,896,448 (353,944,576).
        """
        rows = self.padded_vocab_size() if padded else self.vocab_size
        normed = self.d_model
        for layer in range(self.num_layers):
            normed += self.layer_writes(layer) * self.layer_width(layer)
        total = self._layer_matrices() + self._layer_biases() + normed * (2 if self.norm_bias else 1)
        total += rows * self.d_model
        if not self.tied:
            total += (self.classes or rows) * self.d_model
        if self.positions == "learned":
            total += self.context_length * self.d_model
        if self.qk_norm == "weighted":
            total += 2 * sum(self.layer_head_dim(layer) for layer in range(self.num_layers))
        return total

    def matmul_parameters(self) -> int:
        """N_matmul: weights that every token is multiplied with, the LM head (vocab_size rows) once.

        The few products of a classifier's own head, one a sequence, are counted as if each token had one.
        """
        return self._layer_matrices() + (self.classes or self.vocab_size) * self.d_model

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6 N_matmul + 12 sum_l min(T, window_l) A_l.

        The non-causal convention of PaLM (arXiv 2204.02311, appendix B), as nanoGPT uses it: attention counts
        every (query, key) pair of a full context. Recomputation and padded vocabulary rows are not counted.
        """
        attention = 0
        for layer in range(self.num_layers):
            visible = min(self.context_length, self.layer_window(layer) or self.context_length)
            attention += visible * self.attention_width(layer)
        return 6 * self.matmul_parameters() + 12 * attention

    def _layer_matrices(self) -> int:
        matrices = 3 if self.ffn == "swiglu" else 2
        total = 0
        for layer in range(self.num_layers):
            attention = 2 * self.attention_width(layer) + 2 * self.kv_width(layer) + self.gate_width(layer)
            total += self.layer_width(layer) * (attention + matrices * self.layer_ffn_width(layer))
        return total

    def _layer_biases(self) -> int:
        total = 0
        for layer in range(self.num_layers):
            width = self.layer_ffn_width(layer)
            if self.attention_bias in ("qkv", "all"):
                total += self.attention_width(layer) + 2 * self.kv_width(layer)
            if self.attention_bias in ("output", "all") and self.heads[layer]:
                total += self.layer_width(layer)
            if self.ffn_bias and width:
                total += (2 if self.ffn == "swiglu" else 1) * width + self.layer_width(layer)
        return total

    # ------------------------------------------------------------------ other forms

    def summary(self) -> str:
        """A one-line summary: parameters, layers, heads, gates, what else differs between layers, widths."""
        parts = [f"{self.num_parameters():,} parameters", f"{self.num_layers} layers"]
        parts.append(f"heads {format_heads(self.heads)} {draw_heads(self.heads)}")
        if self.classes is not None:
            parts.append(f"{self.classes} classes")
        if self.kv_heads is not None:
            parts.append(f"KV heads {format_heads(self.kv_heads)}")
        if self.head_dim is not None:
            parts.append(f"head dim {format_heads(self.head_dim)}")
        if isinstance(self.ffn_width, tuple) or not self.ffn_width:
            parts.append(f"FFN width {format_heads(self.ffn_widths)}")
        if self.block_width is not None:
            parts.append(f"block width {format_heads(self.block_widths)}")
        if any(self.local_window or ()):
            windows = ",".join(str(window or "all") for window in self.local_window or ())
            parts.append(f"attention windows {windows}")
        for name, text in (("rope_base", "rotary base"), ("rotary_share", "rotary share")):
            if isinstance(value := getattr(self, name), tuple):
                parts.append(f"{text} {format_heads(value)}")
        if self.attention_gate != "none":
            parts.append(f"attention gate {self.attention_gate}")
        return f"{', '.join(parts)}, d_model {self.d_model}, context {self.context_length}"

    def to_json(self) -> dict[str, Any]:
        """A plain dict (lists, numbers, strings, None) that json.dumps takes and from_json reads back.

        A language model has no entry classes.
        """
        values: dict[str, Any] = to_dict(self)
        if self.classes is None:
            del values["classes"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str = "") -> ModelConfig:
        """Build a config from a dict; schedules of integers may also be written ``"3x2,6x2"``.

        Raises UserError, which begins with *where*, for unknown or missing keys and for values that are not
        valid.
        """
        return from_dict(cls, values, where)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; UserError for unknown fields and values that are not valid."""
        return ModelConfig.from_json({**self.to_json(), **changes})

    def difference(self, other: ModelConfig) -> list[str]:
        """A line ``field: value != other's value`` for every field that differs, in field order."""
        pairs = [(item.name, getattr(self, item.name), getattr(other, item.name)) for item in fields(self)]
        return [f"{name}: {_show(own)} != {_show(its)}" for name, own, its in pairs if own != its]


def _show(value: Any) -> str:
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return format_heads(value)
    return str(list(value)) if isinstance(value, tuple) else str(value)
