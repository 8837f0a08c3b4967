"""Causal self-attention whose head count, head dim, scale and window may differ from layer to layer."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.block_attention import block_attention
from model.collectives import copy_to_ranks
from model.config import ModelConfig
from model.context import ContextExchange
from model.documents import has_varlen_kernel, select_rows, varlen_attention
from model.exchange import Form, HeadExchange, Span
from model.kernels import flash_supports
from model.linears import column_linear, enter_columns, fused_columns, row_linear
from model.norms import head_norm
from model.process_grid import ProcessGrid
from model.rotary import Table, rotate, rotate_spans

Kernel = Literal["torch", "blocks"]
"""The implementation of attention: torch's kernels, or model/block_attention.py. Packed documents that are
kept apart always use torch's."""


BLOCK_ROWS = 256
"""Queries that are computed at a time on a CPU where keys are gathered over context ranks."""


class BlockInputs(NamedTuple):
    """What a block of the network gets besides the hidden states; Transformer.enter makes them. With context
    parallelism tables and document masks have this rank's positions (the masks those of its group, as
    ContextExchange.positions), and where keys are gathered there is no mask for a window."""

    table: Table | None = None
    """Rotary table of the head dim, PackedDocuments.table if documents are packed; None without rotary
    positions."""
    mask: Tensor | None = None
    """Bool [T, T], true where a query (row) sees a key (column), or None for plain causal attention. Of
    packed documents [B, 1, T, T], added to the logits, or None with offsets."""
    offsets: Tensor | None = None
    """Of packed documents where Attention.takes_offsets, int32 [documents + 1]."""


class Heads(NamedTuple):
    """Whole heads of the sequences and queries that a rank attends for, normed and rotated where the model
    does so."""

    query: Tensor
    """[B, rows, h, d_h]"""
    key: Tensor
    """[B, T, kv, d_h]; query head i goes with key head i // (h / kv)."""
    value: Tensor
    """As the key."""
    mask: Tensor | None = None
    """As in BlockInputs, of these sequences."""
    offsets: Tensor | None = None
    """As in BlockInputs, of these sequences."""
    spans: list[Span] | None = None
    """Positions [start, stop) that the rows stand for, chunk after chunk; None is all T."""
    sequences: slice = slice(None)
    """Which sequences of the micro-batch these are."""
    rows: list[Span] | None = None
    """Where keys are gathered over context ranks, the spans as rows of the mask; None: a mask has all
    positions."""


class HeadGate(nn.Module):
    """The sigmoid gates of a layer's heads (arXiv 2505.06708, head-wise).

    Every rank of a tensor group has the whole weight [h, d], since its columns may be a part of a head.
    """

    def __init__(self, config: ModelConfig, layer: int, grid: ProcessGrid) -> None:
        super().__init__()
        self.grid, self.head_dim = grid, config.layer_head_dim(layer)
        self.columns = config.attention_width(layer) // grid.tensor_parallel
        self.weight = nn.Parameter(torch.empty(config.heads[layer], config.layer_width(layer)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, d] -> the gates of this rank's columns [B, T, A/t]."""
        weight: Tensor = self.weight
        first = self.grid.tensor_rank * self.columns
        if self.grid.tensor_parallel > 1:
            weight = copy_to_ranks(weight, self.grid.tensor_group)
        heads = torch.arange(first, first + self.columns, device=weight.device) // self.head_dim
        return F.linear(hidden, weight).sigmoid()[..., heads]


class Attention(nn.Module):
    """Attention of one layer: q [d, A], k and v [d, kv width], o [A, d], with A = h_l * d_h(l) and d the
    layer's width.

    q, k, v and o are separate modules because q and k may need their own learning rate (arXiv 2605.10504).
    With tensor parallelism each rank has an equal part of the columns; see model/exchange.py for the heads.
    *fused_qkv* multiplies by q, k and v at once in training; otherwise their modules run, which hooks can
    watch.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        grid: ProcessGrid,
        fused_qkv: bool = False,
        attention: Kernel = "torch",
    ) -> None:
        super().__init__()
        self.grid = grid
        self.fused_qkv = fused_qkv
        self.attention = attention
        self.exchange: HeadExchange | None = None
        self.context: ContextExchange | None = None
        # Heads that this rank computes at a time: those of its group of ranks, all of them at t = 1.
        self.heads = config.heads[layer]
        self.kv_heads = config.layer_kv_heads(layer)
        if grid.tensor_parallel > 1:
            self.exchange = HeadExchange(config, layer, grid)
            self.heads //= self.exchange.groups
            self.kv_heads //= self.exchange.groups
        if grid.context_parallel > 1:
            self.context = ContextExchange(config, layer, grid)
            # A graph has no hooks for what autograd saves.
            self._attend_together = torch.compiler.disable(attend_together)
        self.head_dim = config.layer_head_dim(layer)
        self.window = config.layer_window(layer)
        # None leaves 1/sqrt(d_h), this layer's own (arXiv 2606.27449, section 1), to SDPA.
        self.scale = config.layer_scale(layer)
        d, width, kv_width = config.layer_width(layer), config.attention_width(layer), config.kv_width(layer)
        bias = config.attention_bias in ("qkv", "all")
        self.q = column_linear(d, width, bias, grid)
        self.k = column_linear(d, kv_width, bias, grid)
        self.v = column_linear(d, kv_width, bias, grid)
        self.o = row_linear(width, d, config.attention_bias in ("output", "all"), grid)
        self.gate: nn.Module | None = None
        self.head_gate: HeadGate | None = None
        if config.attention_gate == "element":
            self.gate = column_linear(d, width, False, grid)
        elif config.attention_gate == "head":
            self.head_gate = HeadGate(config, layer, grid)
        self.q_norm = head_norm(config, layer, grid)
        self.k_norm = head_norm(config, layer, grid)

    def takes_offsets(self, hidden: Tensor, batch: int, length: int) -> bool:
        """Whether packed documents [B, T] are kept apart by offsets, not by a mask (see
        model/documents.py)."""
        if not has_varlen_kernel(hidden, self.head_dim) or (self.context and self.context.ranks > 1):
            return False
        return self.exchange is None or self.exchange.form(batch, length, packed=True).spans == [(0, length)]

    def forward(
        self, hidden: Tensor, table: Table | None, mask: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """Hidden [B, T, d] -> [B, T, d]; what else is given as BlockInputs says."""
        hidden = enter_columns(hidden, self.grid)
        if self.fused_qkv and self.training:  # [B, T, this rank's columns]
            query, key, value = fused_columns(hidden, (self.q, self.k, self.v))
        else:
            query, key, value = self.q(hidden), self.k(hidden), self.v(hidden)
        heads, form = self.whole_heads(query, key, value, table, mask, offsets)
        if self.context is None:
            output = attend(heads, self.scale, self.window, self.attention)
        else:
            output = self._attend_together(heads, self.context, self.scale, self.window, self.attention)
        output = output.flatten(2)  # [B, rows, A]
        return self.project(output if form is None else form.gather(output), hidden)

    def project(self, output: Tensor, hidden: Tensor) -> Tensor:
        """This rank's columns of the heads' outputs [B, T, A/t], gated by what q reads [B, T, d], where there
        are gates, -> [B, T, d]."""
        if self.gate is not None:
            output = output * self.gate(hidden).sigmoid()
        if self.head_gate is not None:
            output = output * self.head_gate(hidden)
        return cast(Tensor, self.o(output))

    def whole_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Table | None,
        mask: Tensor | None,
        offsets: Tensor | None = None,
    ) -> tuple[Heads, Form | None]:
        """This rank's columns [B, T / c, …] of q, k and v -> whole heads of the same positions, which share()
        completes if c > 1; at t > 1 the form that takes outputs back."""
        form: Form | None = None
        spans, sequences = None, slice(None)
        if self.exchange is not None:
            batch, length = query.shape[:2]
            packed = offsets is not None or (mask is not None and mask.ndim == 4)
            form = self.exchange.form(batch, length, packed=packed)
            query, key, value = form.scatter(query, key, value)
            spans = None if form.spans == [(0, length)] else form.spans
            first, last = form.sequences
            sequences = slice(first, last)
            if packed:
                table = table and (table[0][sequences], table[1][sequences])
                mask = None if mask is None else mask[sequences]
                offsets = (
                    None
                    if offsets is None
                    else select_rows(offsets, first, last, length * self.grid.context_parallel)
                )
        query = query.unflatten(2, (self.heads, self.head_dim))  # [B, rows, h, d_h]
        key = key.unflatten(2, (self.kv_heads, self.head_dim))  # [B, T, kv, d_h]
        value = value.unflatten(2, (self.kv_heads, self.head_dim))  # [B, T, kv, d_h]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if table is not None:
            query = rotate(query, table) if spans is None else rotate_spans(query, table, spans)
            key = rotate(key, table)
        return Heads(query, key, value, mask, offsets, spans, sequences), form


def share(heads: Heads, context: ContextExchange) -> tuple[Heads, AbstractContextManager[None]]:
    """The heads of a rank's positions -> those that it attends for, with all keys; what to attend inside
    of."""
    *shared, spans, rows, saving = context.share(*heads[:3], heads.spans)
    query, key, value = shared
    return heads._replace(query=query, key=key, value=value, spans=spans, rows=rows), saving


def attend_together(
    heads: Heads, context: ContextExchange, scale: float | None, window: int | None, attention: Kernel
) -> Tensor:
    """attend() of the heads of this rank's positions, with the keys of all context ranks."""
    shared, saving = share(heads, context)
    with saving:
        output = attend(shared, scale, window, attention)
    return context.join(output)


def attend(heads: Heads, scale: float | None, window: int | None, attention: Kernel = "torch") -> Tensor:
    """Attention of whole heads -> [B, rows, h, d_h].

    Args:
        scale: factor on the logits; None is 1/sqrt(d_h).
        window: how many positions a query sees, its own included; None is all up to its own. The mask
            must agree with it.
        attention: what computes it.
    """
    if heads.offsets is not None:
        return varlen_attention(heads.query, heads.key, heads.value, heads.offsets, scale, window)
    # [B, h, rows, d_h], as SDPA expects it
    query, key, value = (part.transpose(1, 2) for part in (heads.query, heads.key, heads.value))
    mask, groups = heads.mask, query.shape[1] // key.shape[1]
    in_blocks = attention == "blocks" and (mask is None or mask.ndim == 2)
    masked_or_wide = mask is not None or not flash_supports(query.dtype.itemsize, query.shape[-1])
    if in_blocks or (query.is_cuda and masked_or_wide):
        # Only flash takes grouped queries, and without a mask; SDPA's fallback allocates B·h·T·T logits.
        key, value = _repeat_kv(key, groups), _repeat_kv(value, groups)
    if in_blocks:
        parts = [
            block_attention(part, key[:, :, :stop], value[:, :, :stop], scale, window)
            for part, (_, stop) in _parts(query, heads.spans)
        ]
    elif heads.rows is not None:
        parts = [
            _attend_gathered(
                part, key, value, None if mask is None else mask[..., slice(*at), :], span, scale, window
            )
            for (part, span), at in zip(_parts(query, heads.spans), heads.rows, strict=True)
        ]
    elif heads.spans is None:
        parts = [_sdpa(query, key, value, mask, scale, is_causal=mask is None)]
    else:
        parts = [
            _attend_span(part, key, value, mask, span, scale, window)
            for part, span in _parts(query, heads.spans)
        ]
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.transpose(1, 2)  # [B, h, rows, d_h] -> [B, rows, h, d_h]


def _parts(query: Tensor, spans: list[Span] | None) -> list[tuple[Tensor, Span]]:
    """The rows of each span, with it; of all positions where there are none."""
    spans = spans or [(0, query.shape[2])]
    return list(zip(query.split([stop - start for start, stop in spans], dim=2), spans, strict=True))


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool = False,
) -> Tensor:
    """torch's attention, with key heads that several query heads may share."""
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _repeat_kv(heads: Tensor, groups: int) -> Tensor:
    """Keys or values [B, kv, T, d_h] -> [B, h, T, d_h], each repeated for all query heads that share it."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def _attend_span(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    span: Span,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Query rows of positions [start, stop) against the keys that they see."""
    start, stop = span
    # A multiple of 8, since the memory-efficient kernel wants its mask aligned; the mask hides what is too
    # early.
    first = 0 if window is None or mask is None else max(0, start + 1 - window) // 8 * 8
    key, value = key[:, :, first:stop], value[:, :, first:stop]
    if mask is not None:
        return _sdpa(query, key, value, mask[..., start:stop, first:stop], scale)
    if start == 0 or query.is_cuda:
        # Flash and memory-efficient kernels know this alignment; SDPA's is_causal aligns rectangles
        # upper-left.
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler

        groups = query.shape[1] // key.shape[1]  # these kernels take no grouped queries
        bias = causal_lower_right(stop - start, stop - first)
        return _sdpa(query, _repeat_kv(key, groups), _repeat_kv(value, groups), bias, scale)
    return _sdpa(query, key, value, visibility_mask(span, (0, stop), None, query.device), scale)


def _attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    span: Span,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """As _attend_span, with the rows of the mask that the queries are. Without a mask of documents its memory
    on a CPU does not grow with T: a block of queries takes its mask as a view of one that all blocks and
    layers share. On a GPU all queries are one block.
    """
    start, stop = span
    window = None if window is None or window >= stop else window  # where it hides something

    def first_seen(row: int) -> int:
        return 0 if window is None else max(0, row + 1 - window) // 8 * 8

    if mask is not None:
        keys = slice(first_seen(start), stop)
        return _sdpa(query, key[:, :, keys], value[:, :, keys], mask[..., keys], scale)
    if window is None and start == 0:
        return _sdpa(query, key[:, :, :stop], value[:, :, :stop], None, scale, is_causal=True)
    if window is None and query.is_cuda:
        return _attend_span(query, key, value, None, span, scale, window)
    size = stop - start if query.is_cuda else min(stop - start, BLOCK_ROWS)
    seen = block_mask(size, key.shape[2], window, query.dtype, query.device)
    before = seen.shape[1] - size  # columns of the block mask before its first query
    parts = []
    for begin in range(start, stop, size):
        end = min(begin + size, stop)
        first = first_seen(begin)
        part = seen[size - (end - begin) :, before - (begin - first) : before + end - begin]
        rows = query[:, :, begin - start : end - start].flip(2)
        parts.append(_sdpa(rows, key[:, :, first:end], value[:, :, first:end], part, scale).flip(2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@functools.lru_cache(maxsize=16)
def block_mask(
    rows: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The causal mask of a block of queries, the last one first, over as many earlier keys as they may see,
    and their own; to be added to the logits. In this order each row is the one before it moved by one key, so
    on a CPU all rows are views of one; a GPU's kernels need them aligned."""
    before = length if window is None else min(length, window // 8 * 8 + 16)
    keys = before + rows
    with torch.inference_mode(False):  # training saves it
        distance = torch.arange(keys - 1, -rows, -1, device=device)
        seen = _is_visible(distance, window)
        moved = torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        mask = moved.unfold(0, keys, 1)
        return mask.contiguous() if mask.is_cuda else mask


def visibility_mask(queries: Span, keys: Span, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) each query (row) sees, both given by positions [start, stop): bool.

    window: how many positions a query sees, its own included (GPT-Neo); None is all up to its own.
    """
    distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)
    return _is_visible(distance, window)


def _is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key, by how many positions the key is before it."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def local_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """What is seen of *length* positions through a window, bool [length, length].

    None when the window hides nothing, so that SDPA can take its causal path without a mask (flash on GPUs).
    """
    if window is None or window >= length:
        return None
    return visibility_mask((0, length), (0, length), window, device)


def allow_any_length() -> AbstractContextManager[None]:
    """For sampling and scoring, whose batches come in ever new lengths: cuDNN's kernel would plan for each of
    them."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
