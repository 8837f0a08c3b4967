"""Causal attention by batched products, a block of queries at a time: the fast form in bf16 on a CPU.

torch's flash kernel for CPUs multiplies small tiles; batched products reach the rate of large ones. Keys that
are hidden from a block of queries are skipped, except in its last square. The backward pass recomputes the
softmax, so that only q, k and v are kept, as with flash. Logits and attention weights are rounded to the
inputs' dtype, where flash keeps fp32; both sum over keys in fp32. docs/log/speed.md has the times,
tests/model/test_block_attention.py the errors.

Both passes are operators of torch, so that torch.compile takes them as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ROWS = 128
"""Queries of a block."""
ELEMENTS = 2**20
"""Logits made at a time, or those of HEADS heads: with their softmax and its gradient they stay in a
cache."""
HEADS = 8
"""So many heads at least, since every operator has to wake the threads that sleep."""


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Softmax(q kᵀ scale) v over the positions that each query sees.

    Args:
        query: [B, h, R, d_h]: the last R of T positions.
        key, value: [B, h, T, d_h].
        scale: None is 1/sqrt(d_h).
        window: how many positions a query sees, its own included; None is all up to its own.

    Returns:
        [B, h, R, d_h], in the dtype of the inputs.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = torch.ops.head_schedules.block_attention(
        query, key, value, scale, window or key.shape[2]
    )
    return output


@torch.library.custom_op("head_schedules::block_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Query [B, h, R, d_h], key and value [B, h, T, d_h] -> [B, h, R, d_h]."""
    shape = query.shape
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    output = torch.empty_like(query)
    scaled = query * scale
    for heads in _chunks(query, key):
        parts = [
            torch.bmm(
                _attention_weights(scaled[heads, rows], key[heads, keys].contiguous(), window),
                value[heads, keys],
            )
            for rows, keys in _blocks(query.shape[1], key.shape[1], window)
        ]
        torch.cat(parts, 1, out=output[heads])
    return output.view(shape)


@torch.library.custom_op("head_schedules::block_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output, [B, h, R, d_h].

    They are flattened here and not before, where autograd would keep a copy of what a view cannot be made of.
    """
    of_queries, of_keys = query.shape, key.shape
    gradient, query, key, value = (tensor.flatten(0, 1) for tensor in (gradient, query, key, value))
    d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query * scale
    for heads in _chunks(query, key):
        parts = []
        key_sum, value_sum = (torch.empty_like(key[heads], dtype=wide) for _ in range(2))
        # The last block comes first: its keys reach to the end, so its terms initialize the sums.
        for rows, keys in reversed(list(_blocks(query.shape[1], key.shape[1], window))):
            # Products copy what is not dense, each for itself; so copy it once.
            q, part = scaled[heads, rows].contiguous(), gradient[heads, rows].contiguous()
            k, v = key[heads, keys].contiguous(), value[heads, keys].contiguous()
            shares = _attention_weights(q, k, window)
            d_shares = torch.bmm(part, v.transpose(1, 2))
            d_logits = torch._softmax_backward_data(d_shares, shares, -1, shares.dtype)
            begins = rows.stop == query.shape[1]
            _add(value_sum, torch.bmm(shares.transpose(1, 2), part), keys, begins)
            _add(key_sum, torch.bmm(d_logits.transpose(1, 2), q), keys, begins)
            parts.append(torch.bmm(d_logits, k))
        torch.cat(parts[::-1], 1, out=d_query[heads])
        d_key[heads], d_value[heads] = key_sum, value_sum
    return d_query.mul_(scale).view(of_queries), d_key.view(of_keys), d_value.view(of_keys)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    return query.new_empty(query.shape)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.head_schedules.block_attention_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.window
    )
    return (*found, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


def _chunks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Heads that are computed together."""
    heads = max(HEADS, ELEMENTS // (min(ROWS, query.shape[1]) * key.shape[1]))
    return (slice(first, first + heads) for first in range(0, query.shape[0], heads))


def _blocks(rows: int, positions: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the positions of the keys that one of them sees; the last rows are the last
    positions."""
    earlier = positions - rows
    for first in range(0, rows, ROWS):
        last = min(first + ROWS, rows)
        yield slice(first, last), slice(max(0, earlier + first + 1 - window), earlier + last)


def _add(total: Tensor, part: Tensor, keys: slice, begins: bool) -> None:
    """Add part [heads, keys, d_h] to those positions of the total [heads, T, d_h], or begin the total with
    it."""
    if begins:
        total[:, : keys.start] = 0
        total[:, keys] = part
    else:
        total[:, keys] += part


def _attention_weights(scaled: Tensor, key: Tensor, window: int) -> Tensor:
    """Softmax [heads, rows, keys] of a block whose last query is at the last key's position."""
    logits = torch.bmm(scaled, key.transpose(1, 2))
    rows, keys = logits.shape[1:]
    first = 0 if window < keys else keys - rows  # without a window only the last square hides anything
    # Adding is faster than filling, which is not vectorized for a mask that all heads share.
    logits[:, :, first:] += _hide_unseen(
        rows, keys - first, min(window, keys - first), logits.dtype, logits.device
    )
    return torch.softmax(logits, -1)


@functools.lru_cache(maxsize=64)  # made by five small operators, for every block of every layer
def _hide_unseen(rows: int, keys: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, keys]: 0 for a key that a query sees, -inf for one that it does not; the last positions are the
    same."""
    positions = torch.arange(keys, device=device)
    behind = positions[keys - rows :, None] - positions  # from the key to the query
    hidden = (behind < 0) | (behind >= window)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)
