"""Plans tensor parallelism layer by layer: groups of ranks and form of the exchange. Needs no torch.

Models and sizes that do not fit are rejected here, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from model.allocations import MULTIPLE
from model.config import ModelConfig
from model.errors import UserError, describe_nearest, divisors

FormName = Literal["none", "batch", "query"]

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
    raise _cannot_split(batch, length, layer, ranks, ranks, 2 * ranks)


def _cannot_split(
    batch: int, length: int, layer: int, ranks: int, multiple: int, length_multiple: int
) -> UserError:
    lower, upper = batch // multiple * multiple, (batch // multiple + 1) * multiple
    return UserError(
        f"micro_batch: {batch} sequences of {length} tokens cannot be shared by the {ranks} ranks that split "
        f"the heads of layer {layer}; micro_batch must be a multiple of {multiple} (nearest: "
        f"{f'{lower} or ' if lower else ''}{upper}), or context_length one of {length_multiple}"
    )


def check_world(world_size: int, tensor_parallel: int, context_parallel: int = 1) -> None:
    """Reject degrees that do not divide the number of ranks, naming those that do."""
    if type(tensor_parallel) is not int or tensor_parallel < 1 or world_size % tensor_parallel:
        valid = ", ".join(map(str, divisors(world_size)))
        raise UserError(
            f"tensor_parallel: {tensor_parallel!r} does not divide the {world_size} rank"
            f"{'s' if world_size > 1 else ''} of this run; valid values are {valid}{_offer_ranks(world_size)}"
        )
    replicas = world_size // tensor_parallel
    if type(context_parallel) is not int or context_parallel < 1 or replicas % context_parallel:
        valid = ", ".join(map(str, divisors(replicas)))
        each = f", {tensor_parallel} of them tensor-parallel" if tensor_parallel > 1 else ""
        raise UserError(
            f"context_parallel: {context_parallel!r} does not divide the {world_size} "
            f"rank{'s' if world_size > 1 else ''} of this run{each}; valid values are {valid}"
            f"{_offer_ranks(world_size)}"
        )


def _offer_ranks(world_size: int) -> str:
    return "; deepspeed --num_accelerators N starts N ranks" if world_size == 1 else ""


def check_tensor_parallel(
    config: ModelConfig, tensor_parallel: int, *, sequence_parallel: bool = False, world_size: int = 0
) -> None:
    """Reject a degree t that does not divide a width of the model, naming the nearest that divide all.

    Args:
        world_size: the number of ranks, which those named divide too; 0 is not known.

    Raises:
        UserError: t divides not every layer's attention width A_l, key/value width and ffn_width; or, with
            sequence parallelism, not context_length.
    """
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise UserError(f"tensor_parallel: {tensor_parallel!r} is not valid; give a positive integer")
    if tensor_parallel == 1:
        return
    widths: list[tuple[str, int]] = []
    if isinstance(config.ffn_width, tuple):
        widths += [(f"ffn_width (layer {layer})", width) for layer, width in enumerate(config.ffn_width)]
    else:
        widths.append(("ffn_width", config.ffn_width))
    for layer in range(config.num_layers):
        widths.append((f"attention width (layer {layer})", config.attention_width(layer)))
        widths.append((f"key/value width (layer {layer})", config.kv_width(layer)))
    if sequence_parallel:
        widths.append(("context_length (sequence_parallel)", config.context_length))
    for name, width in widths:
        if width % tensor_parallel:
            common_divisor = math.gcd(world_size, *(width for _, width in widths))
            others = [width for name, width in widths if "ffn_width" not in name]
            advice = ""
            if "ffn_width" in name and all(width % tensor_parallel == 0 for width in others):
                multiples = range(tensor_parallel, width + tensor_parallel + 1, tensor_parallel)
                advice = f"; or a width of {describe_nearest(width, multiples)}"
                if "(" in name:
                    multiple = _allocation_multiple(config.ffn_widths, tensor_parallel)
                    advice += f"; an allocation by name takes multiple={multiple}"
            raise UserError(
                f"tensor_parallel: {tensor_parallel} does not divide {name} {width}; nearest valid: "
                f"{describe_nearest(tensor_parallel, divisors(common_divisor))}{advice}"
            )


def _allocation_multiple(widths: Sequence[int], tensor_parallel: int) -> int:
    """The largest multiple of t up to the default of allocations, or t, that keeps the sum of the widths."""
    multiples = range(tensor_parallel, max(MULTIPLE, tensor_parallel) + 1, tensor_parallel)
    return max((multiple for multiple in multiples if sum(widths) % multiple == 0), default=tensor_parallel)


def split_multiple(config: ModelConfig, tensor_parallel: int, context_parallel: int = 1) -> int:
    """The number that a micro-batch of full sequences must be a multiple of, so that every layer's ranks can
    split it.

    1 where all layers have whole heads or can use the query form.
    """
    sizes, length = head_group_sizes(config, tensor_parallel), config.context_length // context_parallel
    return math.lcm(*(ranks for ranks in sizes if ranks > 1 and length % (2 * ranks)))


def head_group_sizes(config: ModelConfig, tensor_parallel: int) -> set[int]:
    """Every r of the model's layers: how many neighbours exchange heads; 1 where the heads are whole."""
    return {
        head_groups(config.layer_kv_heads(layer), tensor_parallel)[1] for layer in range(config.num_layers)
    }


def check_split(
    config: ModelConfig, tensor_parallel: int, micro_batch: int, context_parallel: int = 1
) -> None:
    """Reject a micro-batch that some layer's ranks can split in neither form; UserError names the valid
    ones."""
    multiple = split_multiple(config, tensor_parallel, context_parallel)
    if micro_batch % multiple == 0:
        return
    length = config.context_length // context_parallel
    for layer in range(config.num_layers):
        _, ranks = head_groups(config.layer_kv_heads(layer), tensor_parallel)
        if micro_batch % ranks and length % (2 * ranks):
            lengths = 2 * math.lcm(*head_group_sizes(config, tensor_parallel)) * context_parallel
            raise _cannot_split(micro_batch, length, layer, ranks, multiple, lengths)
