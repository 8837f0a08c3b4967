"""Plans tensor parallelism layer by layer: groups of ranks, form of the exchange, bytes. Needs no torch.

``python -m pretrain.presets exchange --model prism-124m --tensor_parallel 4`` prints the plan.
Models and sizes that do not fit are refused here, before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig, divisors, nearest
from model.errors import UserError

FormName = Literal["none", "batch", "query"]

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


# ---------------------------------------------------------------------- arithmetic


def head_groups(kv_heads: int, tensor_parallel: int) -> tuple[int, int]:
    """g and r: the t ranks form g groups of r neighbours, each of which owns kv_heads / g whole KV heads."""
    groups = math.gcd(kv_heads, tensor_parallel)
    return groups, tensor_parallel // groups


def choose_form(ranks: int, batch: int, length: int, layer: int) -> FormName:
    """The form in which r ranks share the heads of B sequences of T positions.

    Raises:
        UserError: r divides neither B nor T/2.
    """
    if ranks == 1:
        return "none"
    if batch % ranks == 0:
        return "batch"
    if length % (2 * ranks) == 0:
        return "query"
    raise _cannot_split(batch, length, layer, ranks, ranks)


def _cannot_split(batch: int, length: int, layer: int, ranks: int, multiple: int) -> UserError:
    lower, upper = batch // multiple * multiple, (batch // multiple + 1) * multiple
    return UserError(
        f"micro_batch: {batch} sequences of {length} tokens cannot be shared by the {ranks} ranks that split "
        f"the heads of layer {layer}; micro_batch must be a multiple of {multiple} (nearest: "
        f"{f'{lower} or ' if lower else ''}{upper}), or context_length one of {2 * ranks}"
    )


def check_world(world_size: int, tensor_parallel: int) -> None:
    """Refuse a degree that does not divide the number of ranks, naming those that do."""
    if type(tensor_parallel) is not int or tensor_parallel < 1 or world_size % tensor_parallel:
        valid = ", ".join(str(t) for t in range(1, world_size + 1) if world_size % t == 0)
        raise UserError(
            f"tensor_parallel: {tensor_parallel!r} does not divide the {world_size} rank"
            f"{'s' * (world_size > 1)} of this run; valid values are {valid}"
        )


def check_tensor_parallel(
    config: ModelConfig, tensor_parallel: int, *, sequence_parallel: bool = False
) -> None:
    """Refuse a degree t that does not divide a width of the model, naming the nearest that divide all.

    Raises:
        UserError: t divides not every layer's attention width A_l, key/value width, or ffn_width; or, with
            sequence parallelism, not context_length.
    """
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise UserError(f"tensor_parallel: {tensor_parallel!r} is not valid; give a positive integer")
    if tensor_parallel == 1:
        return
    widths = [("ffn_width", config.ffn_width)]
    for layer in range(config.num_layers):
        widths.append((f"attention width (layer {layer})", config.attention_width(layer)))
        widths.append((f"key/value width (layer {layer})", config.kv_width(layer)))
    if sequence_parallel:
        widths.append(("context_length (sequence_parallel)", config.context_length))
    for name, width in widths:
        if width % tensor_parallel:
            common_divisor = math.gcd(*(width for _, width in widths))
            raise UserError(
                f"tensor_parallel: {tensor_parallel} does not divide {name} {width}; nearest valid: "
                f"{nearest(tensor_parallel, divisors(common_divisor))}"
            )


def split_multiple(config: ModelConfig, tensor_parallel: int) -> int:
    """The number that a micro-batch of full sequences must be a multiple of, so that every layer's ranks can
    split it.

    1 where all layers have whole heads or can use the query form.
    """
    sizes = head_group_sizes(config, tensor_parallel)
    return math.lcm(*(ranks for ranks in sizes if ranks > 1 and config.context_length % (2 * ranks)))


def head_group_sizes(config: ModelConfig, tensor_parallel: int) -> set[int]:
    """Every r of the model's layers: how many neighbours exchange heads; 1 where the heads are whole."""
    return {
        head_groups(config.layer_kv_heads(layer), tensor_parallel)[1] for layer in range(config.num_layers)
    }


def check_split(config: ModelConfig, tensor_parallel: int, micro_batch: int) -> None:
    """Refuse a micro-batch that some layer's ranks can split in neither form; UserError names the valid
    ones."""
    multiple = split_multiple(config, tensor_parallel)
    if micro_batch % multiple == 0:
        return
    for layer in range(config.num_layers):
        _, ranks = head_groups(config.layer_kv_heads(layer), tensor_parallel)
        if micro_batch % ranks and config.context_length % (2 * ranks):
            raise _cannot_split(micro_batch, config.context_length, layer, ranks, multiple)


# ---------------------------------------------------------------------- plan


@dataclass(frozen=True)
class LayerPlan:
    """One layer's plan. Bytes are those that one rank sends in the forward and backward pass of one
    micro-batch."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: int
    """g"""
    ranks: int
    """r = t / g: ranks that share whole heads; 1 needs no exchange."""
    form: FormName
    exchange_bytes: int
    """For the head exchange."""
    all_reduce_bytes: int
    """For the sums after o and down and, backward, before q, k, v and gate, up: what any tensor parallelism
    sends."""


@dataclass(frozen=True)
class ParallelPlan:
    """All layers of a model, at one degree and micro-batch."""

    tensor_parallel: int
    micro_batch: int
    context_length: int
    layers: tuple[LayerPlan, ...]
    outside_bytes: int
    """All-reduces outside the layers: embedding, output head, and the loss's fp32 sums."""

    @property
    def exchange_bytes(self) -> int:
        """Bytes sent for the head exchange of all layers."""
        return sum(layer.exchange_bytes for layer in self.layers)

    @property
    def all_reduce_bytes(self) -> int:
        """Bytes sent for all-reduces, which any tensor parallelism needs."""
        return self.outside_bytes + sum(layer.all_reduce_bytes for layer in self.layers)


def plan(config: ModelConfig, tensor_parallel: int, micro_batch: int, dtype: str = "bf16") -> ParallelPlan:
    """Plan a micro-batch of full sequences.

    Bytes are counted as a ring sends them: an all-reduce of n bytes sends 2 n (t-1)/t per rank, an all-gather
    to n bytes and an all-to-all of n bytes n (r-1)/r. Activation checkpointing, which repeats the forward
    pass, is left out.

    Raises:
        UserError: t does not divide the model, or the micro-batch cannot be split.
    """
    check_tensor_parallel(config, tensor_parallel)
    check_split(config, tensor_parallel, micro_batch)
    t, size, tokens = tensor_parallel, DTYPE_BYTES[dtype], micro_batch * config.context_length
    hidden = _ring(tokens * config.d_model * size, t)
    layers = []
    for layer in range(config.num_layers):
        groups, ranks = head_groups(config.layer_kv_heads(layer), t)
        form = choose_form(ranks, micro_batch, config.context_length, layer)
        one_way = exchange_elements(
            form, ranks, tokens, config.attention_width(layer) // t, config.kv_width(layer) // t
        )
        layers.append(
            LayerPlan(
                layer=layer,
                heads=config.heads[layer],
                kv_heads=config.layer_kv_heads(layer),
                head_dim=config.layer_head_dim(layer),
                groups=groups,
                ranks=ranks,
                form=form,
                exchange_bytes=2 * one_way * size,
                all_reduce_bytes=4 * hidden,
            )
        )
    # Embedding forward, output head backward; the largest, the sum and the label's logit of each token (fp64
    # at fp64).
    outside = 2 * hidden + _ring(3 * tokens * max(4, size), t)
    return ParallelPlan(t, micro_batch, config.context_length, tuple(layers), outside if t > 1 else 0)


def exchange_elements(form: FormName, ranks: int, tokens: int, query_width: int, kv_width: int) -> int:
    """Elements that a rank sends for one layer in one direction; the backward pass sends as many.

    Args:
        tokens: B T.
        query_width: columns of q on a rank, A_l / t.
        kv_width: columns of k, and of v, on a rank.
    """
    if form == "batch":  # q, k, v before attention, the output after
        return tokens * (2 * query_width + 2 * kv_width) * (ranks - 1) // ranks
    if form == "query":  # q before attention, the output after; k and v to all
        return tokens * 2 * query_width * (ranks - 1) // ranks + tokens * 2 * kv_width * (ranks - 1)
    return 0


def _ring(number: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce of *number* bytes."""
    return 2 * number * (ranks - 1) // ranks
