"""Causal self-attention whose head count, head dim, scale and window may differ from layer to layer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from model.block_attention import block_attention
from model.config import ModelConfig
from model.documents import has_varlen_kernel, of_rows, varlen_attention
from model.exchange import HeadExchange, Span
from model.linears import column_linear, enter_columns, joint_columns, row_linear
from model.process_grid import ProcessGrid
from model.rotary import Table, rotate, rotate_spans


class Attention(nn.Module):
    """Attention of one layer: q [d, A], k and v [d, kv width], o [A, d], with A = h_l * d_h(l).

    q, k, v and o are separate modules because q and k may need their own learning rate (arXiv 2605.10504).
    With tensor parallelism each rank has an equal part of the columns; see model/exchange.py for the heads.
    *joint* multiplies by q, k and v at once in training; otherwise their modules run, which hooks can watch.
    *blocks* takes model/block_attention.py in place of torch's kernels, but for documents that are kept apart.
    """

    def __init__(
        self, config: ModelConfig, layer: int, grid: ProcessGrid, joint: bool = False, blocks: bool = False
    ) -> None:
        super().__init__()
        self.grid = grid
        self.joint = joint
        self.blocks = blocks
        self.exchange: HeadExchange | None = None
        # Heads that this rank computes at a time: those of its group of ranks, all of them at t = 1.
        self.heads = config.heads[layer]
        self.kv_heads = config.layer_kv_heads(layer)
        if grid.tensor_parallel > 1:
            self.exchange = HeadExchange(config, layer, grid)
            self.heads //= self.exchange.groups
            self.kv_heads //= self.exchange.groups
        self.head_dim = config.layer_head_dim(layer)
        self.window = config.layer_window(layer)
        # None leaves 1/sqrt(d_h), this layer's own (arXiv 2606.27449, section 1), to SDPA.
        self.scale = 1.0 if config.attention_scale == "none" else None
        width, kv_width = config.attention_width(layer), config.kv_width(layer)
        bias = config.attention_bias == "all"
        self.q = column_linear(config.d_model, width, bias, grid)
        self.k = column_linear(config.d_model, kv_width, bias, grid)
        self.v = column_linear(config.d_model, kv_width, bias, grid)
        self.o = row_linear(width, config.d_model, config.attention_bias != "none", grid)

    def takes_offsets(self, hidden: Tensor, batch: int, length: int) -> bool:
        """Whether packed documents [B, T] are kept apart by offsets, not by a mask (see model/documents.py)."""
        if not has_varlen_kernel(hidden, self.head_dim):
            return False
        return self.exchange is None or self.exchange.form(batch, length, packed=True).spans == [(0, length)]

    def forward(
        self, hidden: Tensor, table: Table | None, mask: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """Hidden [B, T, d] -> [B, T, d].

        table: the rotary table of this head dim, or None without rotary positions; PackedDocuments.table if packed.
        mask: [T, T] bool, true where a query (row) sees a key (column), or None for plain causal attention; of packed
            documents [B, 1, T, T], added to the logits, or None with offsets.
        offsets: of packed documents where takes_offsets, int32 [documents + 1].
        """
        hidden = enter_columns(hidden, self.grid)
        if self.joint and self.training:  # [B, T, this rank's columns]
            query, key, value = joint_columns(hidden, (self.q, self.k, self.v))
        else:
            query, key, value = self.q(hidden), self.k(hidden), self.v(hidden)
        if self.exchange is None:
            return self.o(self._attend(query, key, value, table, mask, offsets))
        batch, length = query.shape[:2]
        packed = offsets is not None or (mask is not None and mask.ndim == 4)
        form = self.exchange.form(batch, length, packed=packed)
        query, key, value = form.scatter(query, key, value)
        if packed:
            first, last = form.rows(batch)
            table = table and (table[0][first:last], table[1][first:last])
            mask = None if mask is None else mask[first:last]
            offsets = None if offsets is None else of_rows(offsets, first, last, length)
        return self.o(form.gather(self._attend(query, key, value, table, mask, offsets, form.spans)))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Table | None,
        mask: Tensor | None,
        offsets: Tensor | None,
        spans: list[Span] | None = None,
    ) -> Tensor:
        """Attention on whole heads: query [B, rows, A] -> [B, rows, A]; key and value [B, T, kv width].

        spans: the query positions that the rows stand for, chunk after chunk; None means all T.
        """
        length = key.shape[1]
        query = query.unflatten(2, (self.heads, self.head_dim))  # [B, rows, h, d_h]
        key = key.unflatten(2, (self.kv_heads, self.head_dim))  # [B, T, kv, d_h]
        value = value.unflatten(2, (self.kv_heads, self.head_dim))  # [B, T, kv, d_h]
        all_queries = spans is None or spans == [(0, length)]
        if table is not None:
            query = rotate(query, table) if all_queries else rotate_spans(query, table, spans or [])
            key = rotate(key, table)
        if offsets is not None:
            return varlen_attention(query, key, value, offsets, self.scale, self.window).flatten(2)
        # [B, h, rows, d_h], as SDPA expects it
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        in_blocks = self.blocks and (mask is None or mask.ndim == 2)
        masked_or_wide = mask is not None or not flash_takes(query.dtype.itemsize, self.head_dim)
        if self.kv_heads != self.heads and (in_blocks or (query.is_cuda and masked_or_wide)):
            # Only flash takes grouped queries, and without a mask; SDPA's fallback allocates B·h·T·T logits.
            key, value = self._repeated(key), self._repeated(value)
        if all_queries and in_blocks:
            output = block_attention(query, key, value, self.scale, self.window)
        elif all_queries:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        else:
            sizes = [stop - start for start, stop in spans or []]
            output = torch.cat(
                [
                    self._attend_span(part, key, value, mask, span)
                    for part, span in zip(query.split(sizes, dim=2), spans or [], strict=True)
                ],
                dim=2,
            )
        return output.transpose(1, 2).flatten(2)  # [B, h, rows, d_h] -> [B, rows, A]

    def _repeated(self, heads: Tensor) -> Tensor:
        """Keys or values [B, kv, T, d_h] -> [B, h, T, d_h], each repeated for all query heads that share it."""
        return heads.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def _attend_span(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, span: Span
    ) -> Tensor:
        """Query rows of positions [start, stop) against the keys that they see."""
        start, stop = span
        if self.blocks and (mask is None or mask.ndim == 2):
            return block_attention(query, key[:, :, :stop], value[:, :, :stop], self.scale, self.window)
        # A multiple of 8, since the memory-efficient kernel wants its mask aligned; the mask hides what is too early.
        first = 0 if self.window is None or mask is None else max(0, start + 1 - self.window) // 8 * 8
        key, value = key[:, :, first:stop], value[:, :, first:stop]
        if mask is not None:
            bias = mask[..., start:stop, first:stop]
        elif start == 0 or query.is_cuda:
            # Flash and memory-efficient kernels know this alignment; SDPA's is_causal aligns rectangles upper-left.
            bias = causal_lower_right(stop - start, stop - first)
            if self.kv_heads != self.heads:  # these kernels take no grouped queries
                key, value = self._repeated(key), self._repeated(value)
        else:
            positions = torch.arange(stop, device=query.device)
            bias = positions[start:, None] >= positions
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=self.scale, enable_gqa=key.shape[1] != query.shape[1]
        )


def flash_takes(element_bytes: int, head_dim: int) -> bool:
    """Whether a GPU's flash kernel takes heads of that dtype and size, if there is no mask."""
    return element_bytes == 2 and head_dim <= 256


def local_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask [length, length] of a causal window of *window* positions, the query's own included (GPT-Neo).

    None when the window hides nothing, so that SDPA can take its causal path without a mask (flash on GPUs).
    """
    if window is None or window >= length:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]  # [query, key]
    return (distance >= 0) & (distance < window)


def any_length() -> AbstractContextManager[None]:
    """For sampling and scoring, whose batches come in ever new lengths: cuDNN's kernel would plan for each of them."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
