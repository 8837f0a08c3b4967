"""ModelConfig: every switch of the network, its validation, parameter and FLOP counts, JSON form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from model.errors import UserError, closest, shown
from model.heads import MOST_LAYERS, format_heads, parse_heads

FeedForwardKind = Literal["swiglu", "mlp"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
NormKind = Literal["rmsnorm", "layernorm"]
AttentionBias = Literal["none", "output", "all"]
Positions = Literal["rope", "learned"]
AttentionScale = Literal["sqrt_head_dim", "none"]

# Vocabularies are padded to a multiple of lcm(VOCABULARY_MULTIPLE, t): fast matrix shapes, and the same
# padded size for every tensor-parallel degree t that is a power of two up to 128.
VOCABULARY_MULTIPLE = 128

_LITERALS: dict[str, tuple[str, ...]] = {
    "ffn": get_args(FeedForwardKind),
    "activation": get_args(Activation),
    "norm": get_args(NormKind),
    "attention_bias": get_args(AttentionBias),
    "positions": get_args(Positions),
    "attention_scale": get_args(AttentionScale),
}
_POSITIVE_INTEGERS = ("vocab_size", "context_length", "d_model", "ffn_width")
_POSITIVE_NUMBERS = ("norm_eps", "rope_base", "init_std")
LARGEST_SIZE = 2**31 - 1
"""Limit of any width, count or length: matrix products take no larger ones, and divisors are found quickly."""
LARGEST_NUMBER = 1e30
_BOOLEANS = ("norm_bias", "ffn_bias", "tie_embeddings")
_SCHEDULES = ("heads", "kv_heads", "head_dim", "local_window")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder language model. Layer l has h_l = heads[l] query heads; T is context_length, d is d_model.

    Raises UserError, naming the field and the nearest valid value, when the switches contradict each other.
    """

    vocab_size: int
    """Number of real tokens; embedding rows are padded beyond it (see padded_vocab_size)."""
    context_length: int
    """T: the longest sequence the model accepts, in tokens."""
    d_model: int
    """d: width of the residual stream."""
    heads: tuple[int, ...]
    """The head schedule, one query-head count per layer; its length is the number of layers."""
    ffn_width: int
    """Inner width of the feed-forward network."""
    kv_heads: tuple[int, ...] | None = None
    """Key/value heads per layer, each dividing that layer's heads; None is as many as heads (MHA)."""
    head_dim: tuple[int, ...] | None = None
    """Width of one head per layer; None is d / h_l, so parameters and FLOPs do not depend on the schedule."""
    ffn: FeedForwardKind = "swiglu"
    """swiglu: down(activation(gate(x)) * up(x)); mlp: down(activation(up(x)))."""
    activation: Activation = "silu"
    """Nonlinearity of the feed-forward network; gelu_tanh is GPT-2's approximation."""
    norm: NormKind = "rmsnorm"
    """Kind of every norm. The Prism paper does not name one; LLaMA's is our choice."""
    norm_eps: float = 1e-5
    """Added to the variance (mean square for rmsnorm) before the root."""
    norm_bias: bool = False
    """Whether norms have a bias next to their weight (either kind)."""
    attention_bias: AttentionBias = "none"
    """Biases of the attention projections: none, the output projection only (GPT-Neo), or q, k, v and o."""
    ffn_bias: bool = False
    """Whether the feed-forward projections have biases."""
    positions: Positions = "rope"
    """rope: rotate q and k (RoFormer, arXiv 2104.09864); learned: add an embedding of the position."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths; unused with learned positions. Not given by the Prism paper."""
    attention_scale: AttentionScale = "sqrt_head_dim"
    """Factor on the attention logits: 1/sqrt(d_h(l)) of the layer, or none (GPT-Neo)."""
    local_window: tuple[int | None, ...] | None = None
    """Per layer, how many positions a query sees, itself included; None (one layer, or all) means no limit."""
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""
    init_std: float = 0.02
    """Standard deviation of the weights at the start; residual projections get init_std / sqrt(2L)."""
    classes: int | None = None
    """Classes of a sequence classifier: its head, [classes, d], takes the place of the output head. None: a language
    model."""

    def __post_init__(self) -> None:
        for name in _SCHEDULES:  # lists from JSON become tuples, so that a config can be hashed
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        self._check_scalars()
        self._check_schedules()
        self._check_heads()

    # ------------------------------------------------------------------ validation

    def _check_scalars(self) -> None:
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
                raise UserError(
                    f"{name}: {shown(value)} is not valid; it must be a positive integer{_at_most(value)}"
                )
        for name in _POSITIVE_NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
                raise UserError(f"{name}: {shown(value)} is not valid; it must be a positive number")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if type(value) is not bool:
                raise UserError(f"{name}: {shown(value)} is not valid; it must be true or false")
        for name, valid in _LITERALS.items():
            value = getattr(self, name)
            if value not in valid:
                raise UserError(
                    f"{name}: {shown(value)} is not valid; it must be one of {', '.join(valid)}"
                    f"{closest(shown(value, plain=True), valid)}"
                )

        if self.classes is not None and (
            type(self.classes) is not int or not 2 <= self.classes <= LARGEST_SIZE
        ):
            raise UserError(
                f"classes: {shown(self.classes)} is not valid; it must be an integer of at least 2"
            )

    def _check_schedules(self) -> None:
        if not isinstance(self.heads, tuple) or not self.heads:
            raise UserError(f"heads: {shown(self.heads)} is not a schedule; give one head count per layer")
        if self.num_layers > MOST_LAYERS:
            raise UserError(f"heads: {self.num_layers:,} layers are too many; give at most {MOST_LAYERS:,}")
        for name in _SCHEDULES:
            schedule = getattr(self, name)
            if schedule is None and name != "heads":
                continue
            if not isinstance(schedule, tuple):
                raise UserError(f"{name}: {shown(schedule)} is not a schedule; give one value per layer")
            if len(schedule) != self.num_layers:
                raise UserError(
                    f"{name}: {len(schedule)} layers given, but heads has {self.num_layers}; "
                    f"{name} must have {self.num_layers} values"
                )
            for layer, value in enumerate(schedule):
                if name == "local_window" and value is None:
                    continue
                if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
                    raise UserError(
                        f"{name}: layer {layer} has {shown(value)}; it must be a positive integer{_at_most(value)}"
                    )

    def _check_heads(self) -> None:
        for layer, heads in enumerate(self.heads):
            if self.head_dim is None and self.d_model % heads:
                raise UserError(
                    f"heads: layer {layer} has {heads} heads, which do not divide d_model {self.d_model}; "
                    f"nearest valid: {_nearest(heads, self._valid_head_counts())}"
                )
            head_dim = self.layer_head_dim(layer)
            if self.positions == "rope" and head_dim % 2:
                if self.head_dim is not None:
                    raise UserError(
                        f"head_dim: layer {layer} has {head_dim}; positions 'rope' needs an even head dim; "
                        f"nearest valid: {_nearest(head_dim, [head_dim - 1, head_dim + 1])}"
                    )
                raise UserError(
                    f"heads: layer {layer} has {heads} heads, so head dim {head_dim}; positions 'rope' needs "
                    f"an even one; nearest valid: {_nearest(heads, self._valid_head_counts())}"
                )
            kv_heads = self.layer_kv_heads(layer)
            if heads % kv_heads:
                raise UserError(
                    f"kv_heads: layer {layer} has {kv_heads} key/value heads, which do not divide its "
                    f"{heads} heads; nearest valid: {_nearest(kv_heads, divisors(heads))}"
                )

    def _valid_head_counts(self) -> list[int]:
        valid = divisors(self.d_model)
        if self.positions == "rope":
            valid = [count for count in valid if self.d_model // count % 2 == 0]
        return valid

    # ------------------------------------------------------------------ shapes

    @property
    def num_layers(self) -> int:
        """L: the number of layers."""
        return len(self.heads)

    def layer_head_dim(self, layer: int) -> int:
        """d_h(l): width of one head of the layer."""
        return self.head_dim[layer] if self.head_dim is not None else self.d_model // self.heads[layer]

    def layer_kv_heads(self, layer: int) -> int:
        """Number of key/value heads of the layer."""
        return self.kv_heads[layer] if self.kv_heads is not None else self.heads[layer]

    def layer_window(self, layer: int) -> int | None:
        """How many positions a query of the layer sees, itself included; None is everything before it."""
        return self.local_window[layer] if self.local_window is not None else None

    def attention_width(self, layer: int) -> int:
        """A_l = h_l * d_h(l): columns of q, rows of o; d_model unless head_dim is given."""
        return self.heads[layer] * self.layer_head_dim(layer)

    def kv_width(self, layer: int) -> int:
        """Columns of k and of v."""
        return self.layer_kv_heads(layer) * self.layer_head_dim(layer)

    @property
    def tied(self) -> bool:
        """Whether the output head is the token embedding; never that of a classifier."""
        return self.tie_embeddings and self.classes is None

    def padded_vocab_size(self, tensor_parallel: int = 1) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of lcm(128, tensor_parallel).

        The rows beyond vocab_size are zero, take no part in the softmax and are not exported.
        """
        if type(tensor_parallel) is not int or tensor_parallel < 1:
            raise UserError(
                f"tensor_parallel: {tensor_parallel!r} is not valid; it must be a positive integer"
            )
        multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple

    # ------------------------------------------------------------------ counts

    def num_parameters(self, padded: bool = False, embedding: bool = True) -> int:
        """Exact number of parameters.

        padded counts the zero rows of the embedding (and of an untied output head) too. The Prism paper's
        figures do so: prism-757m has 756,819,456 with 50,304 rows ("756.8M"), but 756,747,264 with the
        50,257 rows that are trained. The others read the same either way: 124M 123,551,232 (padded
        123,587,328), 354M 353,896,448 (353,944,576).
        embedding=False leaves out the token and position embeddings; an untied output head stays in.
        """
        rows = self.padded_vocab_size() if padded else self.vocab_size
        norm = self.d_model * (2 if self.norm_bias else 1)
        total = self._layer_matrices() + self._layer_biases() + (2 * self.num_layers + 1) * norm
        if not self.tied:
            total += (self.classes or rows) * self.d_model
        if embedding:
            total += rows * self.d_model
            total += self.context_length * self.d_model if self.positions == "learned" else 0
        return total

    def matmul_parameters(self) -> int:
        """N_matmul: weights that every token is multiplied with, the output head (vocab_size rows) once.

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
        feed_forward = (3 if self.ffn == "swiglu" else 2) * self.d_model * self.ffn_width
        widths = (
            2 * self.attention_width(layer) + 2 * self.kv_width(layer) for layer in range(self.num_layers)
        )
        return self.num_layers * feed_forward + self.d_model * sum(widths)

    def _layer_biases(self) -> int:
        total = 0
        for layer in range(self.num_layers):
            if self.attention_bias == "all":
                total += self.attention_width(layer) + 2 * self.kv_width(layer)
            if self.attention_bias != "none":
                total += self.d_model
            if self.ffn_bias:
                total += (2 if self.ffn == "swiglu" else 1) * self.ffn_width + self.d_model
        return total

    # ------------------------------------------------------------------ other forms

    def to_json(self) -> dict[str, Any]:
        """A plain dict (lists, numbers, strings, None) that json.dumps takes and from_json reads back.

        A language model has no entry classes, so that versions without that field read it.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.classes is None:
            del values["classes"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a config from a dict; schedules of integers may also be written ``"3x2,6x2"``.

        Raises UserError for unknown or missing keys and for values that are not valid.
        """
        if not isinstance(values, Mapping):
            raise UserError(
                f"model config: {shown(values)} is not a configuration; it must be a mapping (a JSON object) of fields"
            )
        fields = dataclasses.fields(cls)
        _refuse_unknown(values)
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
        if missing:
            raise UserError(f"model config: missing {', '.join(missing)}")
        arguments = dict(values)
        for name in ("heads", "kv_heads", "head_dim"):
            if isinstance(arguments.get(name), str):
                arguments[name] = parse_heads(arguments[name])
        return cls(**arguments)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; UserError for unknown fields and values that are not valid."""
        return ModelConfig.from_json({**self.to_json(), **changes})

    def difference(self, other: ModelConfig) -> list[str]:
        """One line ``field: value != other's value`` for every field that differs, in field order."""
        lines = []
        for field in dataclasses.fields(self):
            value, other_value = getattr(self, field.name), getattr(other, field.name)
            if value != other_value:
                lines.append(f"{field.name}: {_show(value)} != {_show(other_value)}")
        return lines


# Values of the switches that make a block kind; sizes, heads and vocabulary stay free.
BLOCKS: dict[str, dict[str, Any]] = {
    # GPT-2 (Radford et al. 2019), as in transformers' GPT2LMHeadModel.
    "gpt2": {
        "ffn": "mlp", "activation": "gelu_tanh", "norm": "layernorm", "norm_bias": True,
        "attention_bias": "all", "ffn_bias": True, "positions": "learned",
        "attention_scale": "sqrt_head_dim", "tie_embeddings": True,
    },
    # LLaMA (arXiv 2302.13971); the original does not tie embeddings, the Prism presets do.
    "llama": {
        "ffn": "swiglu", "activation": "silu", "norm": "rmsnorm", "norm_bias": False,
        "attention_bias": "none", "ffn_bias": False, "positions": "rope",
        "attention_scale": "sqrt_head_dim", "tie_embeddings": True,
    },
    # GPT-Neo, as in transformers: no scale, bias on the output projection; block() alternates windows.
    "gptneo": {
        "ffn": "mlp", "activation": "gelu_tanh", "norm": "layernorm", "norm_bias": True,
        "attention_bias": "output", "ffn_bias": True, "positions": "learned",
        "attention_scale": "none", "tie_embeddings": True,
    },
}  # fmt: skip

GPTNEO_WINDOW = 256


def block(name: str, **fields: Any) -> ModelConfig:
    """A config with the switches of a block kind (gpt2, llama, gptneo); *fields* set the rest and override them.

    gptneo alternates global layers and layers with a window of 256, the first one global.
    Raises UserError for an unknown kind, unknown or missing fields, and values that are not valid.
    """
    if name not in BLOCKS:
        raise UserError(
            f"block: {name!r} is unknown; it must be one of {', '.join(BLOCKS)}{closest(name, BLOCKS)}"
        )
    _refuse_unknown(fields)
    values = {**BLOCKS[name], **fields}
    heads = values.get("heads")
    if name == "gptneo" and "local_window" not in fields and isinstance(heads, Sequence):
        num_layers = len(parse_heads(heads) if isinstance(heads, str) else heads)
        values["local_window"] = tuple(GPTNEO_WINDOW if layer % 2 else None for layer in range(num_layers))
    return ModelConfig.from_json(values)


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    for key in values:
        if key not in names:
            raise UserError(f"model config: unknown key {shown(key)}{closest(shown(key, plain=True), names)}")


def divisors(number: int) -> list[int]:
    """All divisors, ascending; found in sqrt(number) trials, so that it is quick for any size of a model."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return small + [number // count for count in reversed(small) if count * count != number]


def _at_most(value: Any) -> str:
    return f" of at most {LARGEST_SIZE:,}" if type(value) is int and value > LARGEST_SIZE else ""


def _nearest(value: int, valid: Sequence[int]) -> str:
    """The valid positive values next to *value* from below and above, as text."""
    below = [count for count in valid if 1 <= count <= value]
    above = [count for count in valid if count > value]
    nearest = ([max(below)] if below else []) + ([min(above)] if above else [])
    return " or ".join(str(count) for count in nearest) or "none"


def _show(value: Any) -> str:
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return format_heads(value)
    return str(list(value)) if isinstance(value, tuple) else str(value)
