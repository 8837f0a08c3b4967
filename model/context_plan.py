"""Plans context parallelism layer by layer: which ranks exchange heads, which gather keys. Needs no torch.

The c context ranks hold T/c positions of every sequence each, in zigzag order: of 2c equal chunks rank i
holds the i-th and the (2c-1-i)-th, so that causal work is even. In a layer, g neighbours exchange heads for
positions (DeepSpeed-Ulysses, arXiv 2309.14509) and become one of r = c/g groups in the same zigzag order;
keys and values are then gathered over the groups (Llama 3, arXiv 2407.21783, section 3.3.2). g = 1 gathers
only and takes any head count; g = c exchanges heads only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from model.config import ModelConfig
from model.errors import UserError, describe_nearest, divisors
from model.parallel_plan import head_groups

Span = tuple[int, int]


def zigzag(index: int, ranks: int, length: int) -> list[Span]:
    """Positions [start, stop) of T = *length* that rank *index* holds: a chunk from the front, and one from
    the back."""
    size = length // (2 * ranks)
    return [(chunk * size, (chunk + 1) * size) for chunk in (index, 2 * ranks - 1 - index)]


def check_context_parallel(
    config: ModelConfig,
    context_parallel: int,
    tensor_parallel: int = 1,
    *,
    sequence_parallel: bool = False,
    world_size: int = 0,
) -> None:
    """Reject a degree c that the model cannot be trained with.

    Args:
        world_size: the number of ranks, which t times those named divides too; 0 is not known.

    Raises:
        UserError: context_length is not a multiple of 2c (with sequence parallelism, of 2c and c t); or the
            model is a classifier.
    """
    if type(context_parallel) is not int or context_parallel < 1:
        raise UserError(f"context_parallel: {context_parallel!r} is not valid; give a positive integer")
    if context_parallel == 1:
        return
    if config.classes is not None:
        raise UserError(
            "context_parallel: does not go with a classifier, whose head reads one position of each "
            "sequence; leave it out"
        )
    length = config.context_length
    parts = tensor_parallel if sequence_parallel else 1
    multiple = position_multiple(context_parallel, parts)
    if length % multiple:
        lower = length // multiple * multiple
        possible = divisors(math.gcd(length, world_size // tensor_parallel))
        degrees = [c for c in possible if c == 1 or length % position_multiple(c, parts) == 0]
        lengths = f"{lower} or {lower + multiple}" if lower else str(multiple)
        raise UserError(
            f"context_parallel: context_length {length} is not a multiple of {multiple}, which "
            f"{context_parallel} ranks need for chunks of equal length; nearest valid context_length: "
            f"{lengths}; nearest valid context_parallel: {describe_nearest(context_parallel, degrees)}"
        )


def position_multiple(context_parallel: int, sequence_parts: int = 1) -> int:
    """What the length of a sequence must be a multiple of; *sequence_parts*: t with sequence parallelism,
    else 1."""
    return math.lcm(2 if context_parallel > 1 else 1, sequence_parts) * context_parallel


# ---------------------------------------------------------------------- forms


@dataclass(frozen=True)
class ContextForm:
    """How the context ranks share one layer's attention."""

    head_ranks: int
    """g: neighbours that exchange heads for positions; 1: none do."""
    key_ranks: int
    """r = c / g: groups over which keys and values are gathered; 1: none are."""
    window: int | None = None
    """Of a layer whose keys travel only as far as they are seen; None: all keys are gathered."""


def context_form(
    config: ModelConfig, layer: int, context_parallel: int, tensor_parallel: int = 1
) -> ContextForm:
    """The form in which a rank sends the fewest bytes in the forward and backward pass of full sequences.

    g divides c and the key/value heads that a tensor group's ranks have. Of equal forms the one with the
    larger g is taken, whose attention is one call of a kernel for fewer heads.
    """
    c = context_parallel
    if c == 1 or not config.heads[layer]:
        return ContextForm(1, 1)
    groups, _ = head_groups(config.layer_kv_heads(layer), tensor_parallel)
    forms = []
    for g in divisors(math.gcd(config.layer_kv_heads(layer) // groups, c)):
        forms.append(ContextForm(g, c // g))
        window = config.layer_window(layer)
        if window is not None and window < config.context_length and g < c:
            forms.append(ContextForm(g, c // g, window))
    widths = config.attention_width(layer), config.kv_width(layer)
    return min(
        forms, key=lambda form: (max(elements_sent(form, *widths, config.context_length)), -form.head_ranks)
    )


def head_rank_numbers(config: ModelConfig, context_parallel: int, tensor_parallel: int = 1) -> set[int]:
    """Every g of the model's layers."""
    layers = range(config.num_layers)
    return {context_form(config, layer, context_parallel, tensor_parallel).head_ranks for layer in layers}


# ---------------------------------------------------------------------- bytes


def elements_sent(form: ContextForm, query_width: int, kv_width: int, length: int) -> list[int]:
    """Elements that each group of ranks sends for one layer and sequence, forward and backward, by group
    index.

    Heads: q, k, v and the output pass g ranks once in each direction. Keys: gathered in the forward pass and
    again in the backward pass, whose gradients go the other way. Activation checkpointing, which repeats the
    forward pass, is left out.

    Args:
        query_width, kv_width: columns of q, and of k, on a rank of the tensor group.
        length: T.
    """
    g, r = form.head_ranks, form.key_ranks
    rows = length // (g * r)  # of a rank
    heads = 2 * rows * (2 * query_width + 2 * kv_width) * (g - 1) // g
    if form.window is None:
        return [heads + 3 * 2 * kv_width * rows * (r - 1)] * r
    sent = key_rows(r, length, form.window)
    columns = 2 * kv_width // g
    return [
        heads + columns * (2 * sum(map(_rows, sent[index])) + sum(_rows(to[index]) for to in sent))
        for index in range(r)
    ]


def key_rows(ranks: int, length: int, window: int) -> list[list[list[Span]]]:
    """Positions whose keys travel in a windowed layer, by sender and receiver; none to itself.

    A query at position p sees p - window + 1 … p.
    """
    found: list[list[list[Span]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for receiver in range(ranks):
        seen = [(max(0, start + 1 - window), stop) for start, stop in zigzag(receiver, ranks, length)]
        if seen[1][0] <= seen[0][1]:
            seen = [(seen[0][0], seen[1][1])]  # what both chunks see travels once
        for sender in range(ranks):
            if sender != receiver:
                found[sender][receiver] = [
                    (max(start, first), min(stop, last))
                    for start, stop in zigzag(sender, ranks, length)
                    for first, last in seen
                    if max(start, first) < min(stop, last)
                ]
    return found


def _rows(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)
