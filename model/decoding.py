"""Runs a Transformer token by token, with a key/value cache whose shapes may differ from layer to layer."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Attention
from model.errors import UserError
from model.rotary import Table, rotate
from model.transformer import Block, Transformer


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
        self._cache: list[tuple[Tensor, Tensor]] = []
        for layer in range(config.num_layers):
            shape = (batch, config.layer_kv_heads(layer), config.context_length, config.layer_head_dim(layer))
            self._cache.append((weight.new_empty(shape), weight.new_empty(shape)))

    def cache_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(tensor.nbytes for pair in self._cache for tensor in pair)

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
        hidden = network.token_embedding(tokens)  # [B, n, d]
        if network.position_embedding is not None:
            hidden = hidden + network.position_embedding(torch.arange(start, end, device=tokens.device))
        for layer, module in enumerate(network.layers):
            block = cast(Block, module)
            table = None
            if network.rotary is not None:
                head_dim = config.layer_head_dim(layer)
                cosines, sines = network.rotary.get(head_dim, end, hidden.device, hidden.dtype)
                table = (cosines[start:], sines[start:])
            normed = block.attention_norm(hidden)
            hidden = hidden + self._attend(block.attention, normed, table, self._cache[layer])
            hidden = hidden + block.ffn(block.ffn_norm(hidden))
        self.length = end
        last_hidden = network.final_norm(hidden[:, -1:])
        if network.output is not None:
            logits = network.output(last_hidden)
        else:
            logits = network.token_embedding(last_hidden, as_output=True)
        return logits[:, 0, : config.vocab_size]

    def _attend(
        self, attention: Attention, hidden: Tensor, table: Table | None, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One layer's attention of the new positions [B, n, d] to all positions so far -> [B, n, d]."""
        batch, count = hidden.shape[:2]
        query = attention.q(hidden).view(batch, count, attention.heads, attention.head_dim)
        key = attention.k(hidden).view(batch, count, attention.kv_heads, attention.head_dim)
        value = attention.v(hidden).view(batch, count, attention.kv_heads, attention.head_dim)
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        start, end = self.length, self.length + count
        keys, values = cache
        keys[:, :, start:end] = key.transpose(1, 2)
        values[:, :, start:end] = value.transpose(1, 2)
        # In a windowed layer, keys that no new position sees are not read.
        first = 0 if attention.window is None else max(0, start + 1 - attention.window)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),  # [B, h, n, d_h]
            keys[:, :, first:end],
            values[:, :, first:end],
            attn_mask=_mask(start, end, first, attention.window, hidden.device),
            scale=attention.scale,
            enable_gqa=attention.kv_heads != attention.heads,
        )
        # [B, h, n, d_h] -> [B, n, A]
        return attention.o(output.transpose(1, 2).reshape(batch, count, attention.heads * attention.head_dim))


def _mask(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask [new positions, cached positions from *first*], true where seen; None when all is seen."""
    if end - start == 1:
        return None
    queries = torch.arange(start, end, device=device)
    distance = queries[:, None] - torch.arange(first, end, device=device)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
