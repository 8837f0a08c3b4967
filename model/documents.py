"""Keeps documents that are packed into the rows of a micro-batch apart in attention.

They are given as offsets, int32 [documents + 1]: the start of each in the B rows of T tokens laid end to end,
then B·T. Variable-length attention kernels call this cu_seqlens. Every row begins a document. A position
attends only to its document, up to itself, and is counted from the document's beginning.

Two ways to attend, chosen for each layer. Flash attention's variable-length kernel takes the offsets directly
(CUDA, bf16 or fp16, a torch whose varlen_attn supports windows and scales). Elsewhere
scaled_dot_product_attention takes a mask [B, 1, T, T], which is made once per micro-batch and shared by all
heads and layers of one window. It is additive, in the compute dtype: from a boolean mask SDPA would make such
a one for every layer, kept for the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from model.kernels import Capability, flash_supports
from model.rotary import Table

varlen_attn: Callable[..., Any]
"""torch's kernel for documents, where torch is built for CUDA."""
HAS_VARLEN = False
"""Whether it has windows, scales and grouped queries, which versions of torch have added one by one."""
if torch.version.cuda is not None:  # the import loads torch's compiler, which takes seconds
    try:
        from torch.nn.attention.varlen import varlen_attn

        switches = inspect.signature(varlen_attn).parameters.keys()
        HAS_VARLEN = {"scale", "window_size", "enable_gqa"} <= switches
    except ImportError:
        pass


class PackedDocuments:
    """Positions, rotary tables and masks of one micro-batch's documents, each made once and used by all
    layers.

    Args:
        offsets: int32 [documents + 1], on the device of the hidden states.
        batch: B.
        length: T.
        dtype: of the hidden states.
    """

    def __init__(self, offsets: Tensor, batch: int, length: int, dtype: torch.dtype) -> None:
        from torch._dynamo import maybe_mark_dynamic  # loads torch's compiler

        # Else torch compiles every graph twice: for the first batch's number of documents, then for any.
        maybe_mark_dynamic(offsets, 0)
        self.offsets = offsets
        self.batch, self.length, self.dtype = batch, length, dtype
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._tables: dict[tuple[int, float], Table] = {}

    @cached_property
    def positions(self) -> Tensor:
        """Position of every token in its document, int64 [B, T]."""
        tokens = torch.arange(self.batch * self.length, device=self.offsets.device)
        document = torch.searchsorted(self.offsets, tokens, right=True) - 1
        return (tokens - self.offsets[document]).view(self.batch, self.length)

    def table(self, rotary: tuple[int, float], table: Table) -> Table:
        """Cosines and sines [B, T, 1, d_r / 2] of the positions, from the *table* [T, 1, d_r / 2] of these
        rotated dims and base."""
        if rotary not in self._tables:
            cosines, sines = table
            self._tables[rotary] = (cosines[self.positions], sines[self.positions])
        return self._tables[rotary]

    def mask(self, window: int | None, rows: Tensor | None = None) -> Tensor:
        """Mask [B, 1, T, T] to be added to the logits: 0 where a query (row) sees a key (column), else -inf.

        window: how many positions a query sees at most, its own included; None is all of its document's.
        rows: positions of the queries, ascending, which their number tells from others; None is all T.
        """
        if window is not None and window >= self.length:
            window = None  # it hides nothing: one mask serves both
        key = (window, self.length if rows is None else len(rows))
        if key not in self._masks:
            keys = torch.arange(self.length, device=self.offsets.device)
            queries = keys if rows is None else rows
            first = queries - self.positions[:, queries]  # [B, rows]: the first key that each query sees
            if window is not None:
                first = torch.maximum(first, queries - (window - 1))
            seen = keys >= first[..., None]  # [B, rows, T]
            seen &= keys <= queries[:, None]
            mask = torch.full(seen.shape, float("-inf"), dtype=self.dtype, device=seen.device)
            self._masks[key] = mask.masked_fill_(seen, 0).unsqueeze(1)
        return self._masks[key]


def extend_offsets(offsets: Tensor, length: int, added: int) -> Tensor:
    """The offsets after *added* positions were appended to every row of *length*."""
    return offsets + torch.div(offsets, length, rounding_mode="floor") * added


def select_rows(offsets: Tensor, first: int, last: int, length: int) -> Tensor:
    """Offsets of rows ``first … last - 1`` alone; documents of other rows stay as empty ones, so the size is
    fixed."""
    return offsets.clamp(first * length, last * length) - first * length


def has_varlen_kernel(hidden: Tensor, head_dim: int) -> bool:
    """Whether flash attention's variable-length kernel supports these hidden states and heads (Ampere or
    newer)."""
    if not (HAS_VARLEN and hidden.is_cuda and hidden.dtype.itemsize == 2):
        return False
    capability = _capability(hidden.device.index or 0)
    return capability >= (8, 0) and varlen_head_dim(head_dim, capability)


def varlen_head_dim(head_dim: int, capability: Capability | None = None) -> bool:
    """Whether the kernel trains heads of this size
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) on that GPU; None is every GPU."""
    return head_dim % 8 == 0 and flash_supports(2, head_dim, capability)


@lru_cache(maxsize=16)
def _capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attention of packed documents: query [B, T, h, d_h], key and value [B, T, kv, d_h] -> [B, T, h, d_h].

    scale: None is 1/sqrt(d_h). window: as in PackedDocuments.mask.
    """
    length = query.shape[1]
    output = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        offsets,
        offsets,
        length,  # the longest possible document: the actual one would have to be read from the device
        length,
        scale=scale,
        # Visible positions to the left of a query, and to its right; (-1, 0) is causal.
        window_size=(-1 if window is None or window >= length else window - 1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return cast(Tensor, output).unflatten(0, (-1, length))
