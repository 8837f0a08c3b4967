"""Runs a Transformer token by token, with a key/value cache whose shapes may differ from layer to layer."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Attention, visibility_mask
from model.errors import UserError
from model.rotary import Table
from model.transformer import Block, Transformer, read_stream, widen_stream, write_stream

LEAST_ROOM = 256
"""Tokens that a cache has room for at first."""


class CachedDecoder:
    """Runs a network on new tokens and caches the keys and values of earlier ones.

    Layer l caches [B, kv heads of l, T, head dim of l] twice. The weights must be unsharded (no ZeRO-3, no
    tensor parallelism).

    Args:
        network: in evaluation mode.
        batch: B, sequences decoded side by side; all have the same length.
    """

    def __init__(self, network: Transformer, batch: int = 1) -> None:
        self.network = network
        self.length = 0
        """Tokens seen so far."""
        weight = next(network.parameters())
        config = network.config
        self._room = 0
        self._cache: list[tuple[Tensor, Tensor]] = []
        for layer in range(config.num_layers):
            shape = (batch, config.layer_kv_heads(layer), 0, config.layer_head_dim(layer))
            self._cache.append((weight.new_empty(shape), weight.new_empty(shape)))

    def _reserve(self, length: int) -> None:
        """Have room for *length* tokens: twice as many as before, since a context may be far longer than a
        text."""
        if length > self._room:
            room = min(max(length, 2 * self._room, LEAST_ROOM), self.network.config.context_length)
            added = (0, 0, 0, room - self._room)
            self._cache = [(F.pad(keys, added), F.pad(values, added)) for keys, values in self._cache]
            self._room = room

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """New tokens [B, n] int64 -> logits [B, vocab_size] of the token that follows the last one.

        Raises:
            UserError: the tokens would exceed context_length.
        """
        network, config = self.network, self.network.config
        start, end = self.length, self.length + tokens.shape[1]
        if end > config.context_length:
            raise UserError(f"tokens: {end} positions exceed context_length {config.context_length}")
        self._reserve(end)
        hidden = network.token_embedding(tokens)  # [B, n, d]
        if network.position_embedding is not None:
            hidden = hidden + network.position_embedding(torch.arange(start, end, device=tokens.device))
        stream = widen_stream(hidden, config.stream_width)
        for layer, module in enumerate(network.layers):
            block = cast(Block, module)
            hidden = read_stream(stream, block.width)
            if block.attention is not None and block.attention_norm is not None:
                normed, table = block.attention_norm(hidden), network.table(layer, hidden, start, end)
                hidden = hidden + self._attend(block.attention, normed, table, self._cache[layer])
            if block.ffn is not None and block.ffn_norm is not None:
                hidden = hidden + block.ffn(block.ffn_norm(hidden))
            stream = write_stream(stream, hidden)
        self.length = end
        return network.logits_of(stream[:, -1:])[:, 0, : config.vocab_size]

    def _attend(
        self, attention: Attention, hidden: Tensor, table: Table | None, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One layer's attention of the new positions [B, n, d] to all positions so far -> [B, n, d]."""
        columns = (attention.q(hidden), attention.k(hidden), attention.v(hidden))
        (query, key, value, *_), _ = attention.whole_heads(*columns, table, None)
        count = hidden.shape[1]
        start, end = self.length, self.length + count
        keys, values = cache
        keys[:, :, start:end] = key.transpose(1, 2)
        values[:, :, start:end] = value.transpose(1, 2)
        # In a windowed layer, keys that no new position sees are not read. One new position sees all others.
        first = 0 if attention.window is None else max(0, start + 1 - attention.window)
        mask = (
            None
            if count == 1
            else visibility_mask((start, end), (first, end), attention.window, hidden.device)
        )
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [B, h, n, d_h]
            keys[:, :, first:end],
            values[:, :, first:end],
            attn_mask=mask,
            scale=attention.scale,
            enable_gqa=attention.kv_heads != attention.heads,
        )
        return attention.project(output.transpose(1, 2).flatten(2), hidden)  # [B, h, n, d_h] -> [B, n, A]
