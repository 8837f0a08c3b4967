"""Context parallelism: the ranks of a context group hold parts of every sequence, and attend to all of it.

Which parts, and how the ranks of a layer share its attention, is planned in model/context_plan.py. Everything
but attention works on a rank's own positions. Keys and values that were gathered are not kept for the
backward pass: what autograd saves of them is replaced by its geometry, and they are gathered again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from model.collectives import add_and_scatter, all_gather, exchange, gather, make_differentiable
from model.config import ModelConfig
from model.context_plan import ContextForm, Span, context_form, key_rows, zigzag
from model.process_grid import ProcessGrid


def own_positions(tensor: Tensor, grid: ProcessGrid, dim: int) -> Tensor:
    """This rank's positions of a tensor with all T along *dim*, in the order of its rows; at c = 1 all."""
    if grid.context_parallel == 1:
        return tensor
    spans = zigzag(grid.context_rank, grid.context_parallel, tensor.shape[dim])
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in spans], dim)


def all_positions(own: Tensor, grid: ProcessGrid) -> Tensor:
    """This rank's positions [B, T/c, …] -> all [B, T, …]; a gradient is summed over the ranks that used
    it."""
    return _in_order(all_gather(own, grid.context_group), 1)


def _in_order(parts: Tensor, dim: int) -> Tensor:
    """Parts [r, …] of r groups in zigzag order, of which *dim* of each is positions -> positions in order."""
    low, high = parts.chunk(2, dim + 1)
    return torch.cat((*low.unbind(), *high.flip(0).unbind()), dim)


def _in_zigzag(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The inverse of _in_order: [r, …]."""
    low, high = whole.chunk(2, dim)
    pairs = zip(low.chunk(ranks, dim), reversed(high.chunk(ranks, dim)), strict=True)
    return torch.stack([torch.cat(pair, dim) for pair in pairs])


def _heads_for_positions(heads: Tensor, group: Any) -> Tensor:
    parts = heads.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0)  # [g, B, rows, h/g, d_h]
    return _in_order(exchange(parts, group), 1)


def _positions_for_heads(heads: Tensor, group: Any) -> Tensor:
    received = exchange(_in_zigzag(heads, dist.get_world_size(group), 1), group)  # [g, B, rows, h/g, d_h]
    return received.movedim(0, 2).flatten(2, 3)


heads_for_positions = make_differentiable(_heads_for_positions, _positions_for_heads)
"""All heads of a rank's positions [B, rows, h, d_h] -> the rank's heads of the group's positions, in order
[B, g rows, h/g, d_h]."""
positions_for_heads = make_differentiable(_positions_for_heads, _heads_for_positions)
"""The inverse of heads_for_positions."""


class SharedHeads(NamedTuple):
    """What a rank attends with, see model.attention.Heads; and in which context it does."""

    query: Tensor
    key: Tensor
    value: Tensor
    spans: list[Span] | None
    """Positions that the queries stand for; None is all T."""
    rows: list[Span] | None
    """The same, as rows of a mask that has this group's positions only; None where a mask has all."""
    saving: contextlib.AbstractContextManager[Any]
    """Attention is computed inside it, so that gathered keys are not kept."""


class ContextExchange:
    """Shares one layer's attention among the context ranks.

    Args:
        config: the model, whose context_length is a multiple of 2c.
        layer: which layer.
        grid: this rank's place, with c > 1.
    """

    def __init__(self, config: ModelConfig, layer: int, grid: ProcessGrid) -> None:
        self.grid = grid
        self.form: ContextForm = context_form(config, layer, grid.context_parallel, grid.tensor_parallel)
        self.ranks = self.form.key_ranks
        """r: groups that keys are gathered over."""
        self.index, self.head_index = divmod(grid.context_rank, self.form.head_ranks)
        """Which of these groups this rank is in; and which of its part of the heads this rank has."""
        self.head_group, self.key_group = grid.context_groups[self.form.head_ranks]
        self.gathers_again = True
        """Whether keys are gathered again in the backward pass; activation checkpointing does so anyway."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of this rank's group, int64, of T = *length*: the rows of its masks."""
        spans = zigzag(self.index, self.ranks, length)
        return torch.cat([torch.arange(*span, device=device) for span in spans])

    def share(self, query: Tensor, key: Tensor, value: Tensor, own: list[Span] | None) -> SharedHeads:
        """Heads of this rank's positions -> those of its queries, and the keys that they see.

        Args:
            query: [B, rows, h, d_h].
            key, value: [B, T/c, kv, d_h].
            own: which of the T/c positions the queries stand for, two spans; None is all.

        Returns:
            query [B, g rows, h/g, d_h]; key and value [B, T, kv/g, d_h], or with r > 1 a key for every query
            head; of a windowed layer only what is seen is not zero.
        """
        length = key.shape[1] * self.grid.context_parallel
        spans = self._spans(own, length)
        if self.form.head_ranks > 1:
            query, key, value = self._exchange_heads(query, key, value)
        if self.ranks == 1:
            whole = spans == [(0, length)]
            return SharedHeads(query, key, value, None if whole else spans, None, contextlib.nullcontext())
        groups = query.shape[2] // key.shape[2]
        pair = torch.stack((key, value))  # [2, B, positions of the group, kv/g, d_h]
        both = _GatherKeys.apply(pair, self, groups)  # [2, B, T, h/g, d_h]
        saving: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if torch.is_grad_enabled() and self.gathers_again:
            kept = pair.detach()
            saving = save_geometry(both, lambda: self.gather_keys(kept, groups))
        rows = [self.mask_rows(span, length) for span in spans]
        return SharedHeads(query, both[0], both[1], spans, rows, saving)

    def join(self, output: Tensor) -> Tensor:
        """The output of attention [B, g rows, h/g, d_h] -> that of this rank's rows, all heads [B, rows, h,
        d_h]."""
        if self.form.head_ranks == 1:
            return output
        return positions_for_heads(output, self.head_group)

    def _exchange_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Each [B, rows, h, d_h] -> [B, g rows, h/g, d_h]."""
        parts = [query, key, value]
        g = self.form.head_ranks
        if query.shape[1] != key.shape[1]:  # tensor ranks share the queries of these positions
            return [heads_for_positions(part, self.head_group) for part in parts]
        # Together, so that the ranks wait for each other once.
        together = torch.cat([part.unflatten(2, (g, -1)) for part in parts], 3).flatten(2, 3)
        sizes = [part.shape[2] // g for part in parts]
        return list(heads_for_positions(together, self.head_group).split(sizes, 2))

    def _spans(self, own: list[Span] | None, length: int) -> list[Span]:
        """Positions of the group's queries; neighbouring spans are one."""
        c, g = self.grid.context_parallel, self.form.head_ranks
        size = length // (2 * c)
        (low, low_end), (high, high_end) = own or [(0, size), (size, 2 * size)]
        first = self.index * g
        found = [(rank * size + low, rank * size + low_end) for rank in range(first, first + g)]
        for rank in reversed(range(first, first + g)):
            begin = (2 * c - 2 - rank) * size  # rows [size, 2 size) of a rank are chunk 2c - 1 - rank
            found.append((begin + high, begin + high_end))
        merged = [found[0]]
        for start, stop in found[1:]:
            if start == merged[-1][1]:
                merged[-1] = merged[-1][0], stop
            else:
                merged.append((start, stop))
        return merged

    def mask_rows(self, span: Span, length: int) -> Span:
        """The rows of ``positions`` that a span is."""
        (low, low_end), (high, _) = zigzag(self.index, self.ranks, length)
        shift = low if span[0] < low_end else high - (low_end - low)
        return span[0] - shift, span[1] - shift

    # ------------------------------------------------------------------ keys

    def gather_keys(self, pair: Tensor, groups: int) -> Tensor:
        """Keys and values of this group's positions [2, B, n, kv, d_h] -> of all [2, B, T, groups kv,
        d_h]."""
        if self.form.window is None:
            whole = _in_order(gather(pair, self.key_group), 2)
        else:
            whole = self._gather_seen(pair)
        return whole.repeat_interleave(groups, dim=3) if groups > 1 else whole

    def sum_keys(self, gradient: Tensor, groups: int) -> Tensor:
        """The transpose of gather_keys."""
        if groups > 1:
            gradient = gradient.unflatten(3, (-1, groups)).sum(4)
        if self.form.window is None:
            return add_and_scatter(_in_zigzag(gradient, self.ranks, 2), self.key_group)
        return self._sum_seen(gradient)

    def _gather_seen(self, pair: Tensor) -> Tensor:
        length = pair.shape[2] * self.ranks
        rows = pair.movedim(2, 0)  # [n, 2, B, kv, d_h]
        sent, received = self._travelling(length)
        own = zigzag(self.index, self.ranks, length)
        size = own[0][1] - own[0][0]
        places = [self.mask_rows(span, length) for spans in sent for span in spans]
        arrived = self._travel(_cut(rows, places), _lengths(sent), _lengths(received))
        whole = rows.new_zeros((length, *rows.shape[1:]))
        whole[slice(*own[0])], whole[slice(*own[1])] = rows[:size], rows[size:]
        _paste(whole, arrived, received)
        return whole.movedim(0, 2).contiguous()

    def _sum_seen(self, gradient: Tensor) -> Tensor:
        length = gradient.shape[2]
        whole = gradient.movedim(2, 0)
        sent, received = self._travelling(length)
        places = [span for spans in received for span in spans]
        arrived = self._travel(_cut(whole, places), _lengths(received), _lengths(sent))
        total = _cut(whole, zigzag(self.index, self.ranks, length))
        if total.dtype in (torch.bfloat16, torch.float16):
            total = total.float()
        for span, part in zip([s for spans in sent for s in spans], _split(arrived, sent), strict=True):
            total[slice(*self.mask_rows(span, length))] += part
        return total.to(gradient.dtype).movedim(0, 2).contiguous()

    def _travelling(self, length: int) -> tuple[list[list[Span]], list[list[Span]]]:
        """Positions that this rank sends and receives, by the other's index."""
        window = self.form.window
        assert window is not None
        table = key_rows(self.ranks, length, window)
        return table[self.index], [by_receiver[self.index] for by_receiver in table]

    def _travel(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows, received, sent, group=self.key_group)
        return result


def _cut(rows: Tensor, spans: list[Span]) -> Tensor:
    """The rows of all spans, one after the other."""
    return torch.cat([rows[:0], *(rows[start:stop] for start, stop in spans)])


def _paste(whole: Tensor, rows: Tensor, places: list[list[Span]]) -> None:
    spans = [span for spans in places for span in spans]
    for (start, stop), part in zip(spans, _split(rows, places), strict=True):
        whole[start:stop] = part


def _split(rows: Tensor, places: list[list[Span]]) -> tuple[Tensor, ...]:
    return rows.split([stop - start for spans in places for start, stop in spans])


def _lengths(places: list[list[Span]]) -> list[int]:
    return [sum(stop - start for start, stop in spans) for spans in places]


class _GatherKeys(torch.autograd.Function):
    """ContextExchange.gather_keys, and sum_keys as its backward pass."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor, exchange: ContextExchange, groups: int) -> Tensor:
        ctx.exchange, ctx.groups = exchange, groups
        return exchange.gather_keys(pair, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.sum_keys(gradients[0].contiguous(), ctx.groups), None, None


def save_geometry(whole: Tensor, make: Callable[[], Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inside it, autograd keeps shape and strides of what it would save of *whole*, or of views of it.

    Args:
        make: makes *whole* again, in the backward pass, once for all that was saved.
    """
    storage = whole.untyped_storage().data_ptr()
    number = 0  # of tensors that were saved and not yet asked for
    again: Tensor | None = None

    def pack(tensor: Tensor) -> Any:
        nonlocal number
        if tensor.untyped_storage().data_ptr() != storage:
            return tensor
        number += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        nonlocal number, again
        if isinstance(packed, Tensor):
            return packed
        if again is None:
            again = make()
        result = again.as_strided(*packed)
        number -= 1
        if number <= 0:
            again = None
        return result

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
