"""The network: embedding, pre-norm blocks, final norm, output head, loss."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, local_mask
from model.collectives import gather_last
from model.config import ModelConfig
from model.documents import PackedDocuments, widened
from model.errors import UserError
from model.feedforward import FeedForward
from model.linears import column_linear, enter_columns, position_embedding, token_embedding
from model.loss import IGNORED_LABEL, cross_entropy, parallel_cross_entropy, whole_cross_entropy
from model.norms import build_norm
from model.parallel_plan import check_tensor_parallel
from model.process_grid import ALONE, ProcessGrid
from model.rotary import RotaryTables, Table


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, grid: ProcessGrid) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, grid)
        self.attention = Attention(config, layer, grid)
        self.ffn_norm = build_norm(config, grid)
        self.ffn = FeedForward(config, grid)

    def forward(
        self, hidden: Tensor, table: Table | None, mask: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """Hidden [B, T, d] -> [B, T, d]; table, mask and offsets as in Attention.forward."""
        hidden = hidden + self.attention(self.attention_norm(hidden), table, mask, offsets)
        return hidden + self.ffn(self.ffn_norm(hidden))


class Transformer(nn.Module):
    """A decoder language model built from a ModelConfig; see there for every switch.

    Its weights are torch's defaults until model.initialization.initialize sets them.
    checkpoint_activations keeps only each block's input and runs the block again in the backward pass.
    On a *grid* with t > 1 this is the part of the model that its rank holds; without one the model is whole.

    Raises UserError if t does not divide the widths of the model.
    """

    def __init__(
        self, config: ModelConfig, grid: ProcessGrid = ALONE, *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.grid = grid
        check_tensor_parallel(config, grid.tensor_parallel, sequence_parallel=grid.sequence_parallel)
        rows = config.padded_vocab_size(grid.tensor_parallel)
        self.token_embedding: nn.Module = token_embedding(rows, config.d_model, grid)
        self.position_embedding: nn.Embedding | None = None
        self.rotary: RotaryTables | None = None
        if config.positions == "learned":
            self.position_embedding = position_embedding(config.context_length, config.d_model, grid)
        else:
            self.rotary = RotaryTables(config.context_length, config.rope_base)
        self.layers = nn.ModuleList(Block(config, layer, grid) for layer in range(config.num_layers))
        self.final_norm = build_norm(config, grid)
        self.output: nn.Module | None = None
        if not config.tie_embeddings:
            self.output = column_linear(config.d_model, rows, bias=False, grid=grid)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, document_offsets: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T] int64 -> logits [B, T, vocab_size], or with labels the mean loss, a scalar in nats.

        labels [B, T] int64: the token that follows each position (already shifted by the caller), -100 where
        nothing is to be predicted. T may be at most context_length; UserError otherwise.

        document_offsets int32 [documents + 1]: where documents begin when the B rows are laid end to end, then B·T.
        Each row begins a document. No position then attends to another document, and positions count from 0 in each of
        them: the logits are those of every document run by itself. None: each row is one document.
        """
        batch, length = tokens.shape
        if length > self.config.context_length:
            raise UserError(f"tokens: {length} positions exceed context_length {self.config.context_length}")
        if self.grid.sequence_parallel and length % self.grid.tensor_parallel:
            # Sampling, at any length. No other position attends to those added at the end.
            padding = (0, -length % self.grid.tensor_parallel)
            tokens = F.pad(tokens, padding)
            if document_offsets is not None:
                document_offsets = widened(document_offsets, length, padding[1])
            if labels is not None:
                return self.forward(tokens, F.pad(labels, padding, value=IGNORED_LABEL), document_offsets)
            return self.forward(tokens, None, document_offsets)[:, :length]
        hidden = self.token_embedding(tokens)  # [B, T, d]
        documents = None
        if document_offsets is not None:
            documents = PackedDocuments(document_offsets, batch, length, hidden.dtype)
        if self.position_embedding is not None:
            positions = documents.positions if documents else torch.arange(length, device=tokens.device)
            hidden = hidden + self.position_embedding(positions)
        hidden = self._run_layers(hidden, length, documents)
        if labels is not None:
            return self.loss_of(hidden, labels)
        logits = self._logits(hidden)
        if self.grid.tensor_parallel > 1:
            logits = gather_last(logits, self.grid.tensor_group)
        return logits[..., : self.config.vocab_size]

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The last block's output [B, T, d] and labels [B, T] -> mean loss in nats: final norm, head, cross entropy."""
        logits = self._logits(hidden)
        if self.grid.tensor_parallel > 1:
            return parallel_cross_entropy(logits, labels, self.config.vocab_size, self.grid)
        if torch.compiler.is_compiling():
            return whole_cross_entropy(logits, labels, self.config.vocab_size)
        return cross_entropy(logits, labels, self.config.vocab_size)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The last block's output [B, T, d] -> this rank's logits [B, T, padded vocabulary / t]."""
        hidden = enter_columns(self.final_norm(hidden), self.grid)
        if self.output is not None:
            return cast(Tensor, self.output(hidden))
        return cast(Tensor, self.token_embedding(hidden, as_output=True))

    def _run_layers(self, hidden: Tensor, length: int, documents: PackedDocuments | None) -> Tensor:
        device = hidden.device
        # Layers with the same window share one mask.
        masks: dict[int | None, Tensor | None] = {}
        if documents is None:
            windows = {self.config.layer_window(layer) for layer in range(self.config.num_layers)}
            masks = {window: local_mask(length, window, device) for window in windows}
        for layer, module in enumerate(self.layers):
            block = cast(Block, module)
            window = self.config.layer_window(layer)
            mask, table, offsets = masks.get(window), None, None
            if self.rotary is not None:
                head_dim = self.config.layer_head_dim(layer)
                table = self.rotary.get(head_dim, length, device, hidden.dtype)
                table = table if documents is None else documents.table(head_dim, table)
            if documents is not None and block.attention.takes_offsets(hidden, documents.batch, length):
                offsets = documents.offsets
            elif documents is not None:
                mask = documents.mask(window)
            if self.checkpoint_activations and torch.is_grad_enabled():
                hidden = cast(Tensor, checkpoint(block, hidden, table, mask, offsets, use_reentrant=False))
            else:
                hidden = block(hidden, table, mask, offsets)
        return hidden
