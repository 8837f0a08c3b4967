"""The network: embedding, pre-norm blocks, final norm, LM head, loss."""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, BlockInputs, Kernel, local_mask
from model.collectives import gather_last, sum_of_shares
from model.config import ModelConfig
from model.context import all_positions, own_positions
from model.context_plan import check_context_parallel, position_multiple
from model.documents import PackedDocuments, extend_offsets
from model.errors import UserError
from model.feedforward import FeedForward
from model.linears import enter_columns, lm_head, position_embedding, token_embedding
from model.lm_head_loss import lm_head_cross_entropy, loss_and_residual
from model.loss import IGNORED_LABEL, apply_softcap, cross_entropy, parallel_cross_entropy
from model.norms import Norm, build_norm
from model.parallel_plan import check_tensor_parallel
from model.process_grid import ALONE, ProcessGrid
from model.rotary import RotaryTables, Table, table_rows

Fused = Literal["all", "loss", "none"]
"""What is fused: all (q, k and v; gate and up; the LM head and the loss), the last only, or
nothing."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); without one of both in layers that lack it. x is the
    first *width* coordinates of the residual stream, the others stay. *fused* and *attention* are those of
    Attention and FeedForward."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        grid: ProcessGrid,
        fused: bool = False,
        attention: Kernel = "torch",
    ) -> None:
        super().__init__()
        self.width = config.layer_width(layer)
        self.attention_norm: Norm | None = None
        self.attention: Attention | None = None
        self.ffn_norm: Norm | None = None
        self.ffn: FeedForward | None = None
        if config.heads[layer]:
            self.attention_norm = build_norm(config, self.width, grid)
            self.attention = Attention(config, layer, grid, fused, attention)
        if config.layer_ffn_width(layer):
            self.ffn_norm = build_norm(config, self.width, grid)
            self.ffn = FeedForward(config, layer, grid, fused)

    def forward(
        self, hidden: Tensor, table: Table | None, mask: Tensor | None, offsets: Tensor | None = None
    ) -> Tensor:
        """The residual stream [B, T, d] -> [B, T, d]; what else is given as BlockInputs says."""
        stream, hidden = hidden, read_stream(hidden, self.width)
        if self.attention is not None and self.attention_norm is not None:
            hidden = hidden + self.attention(self.attention_norm(hidden), table, mask, offsets)
        if self.ffn is not None and self.ffn_norm is not None:
            hidden = hidden + self.ffn(self.ffn_norm(hidden))
        return write_stream(stream, hidden)


def read_stream(stream: Tensor, width: int) -> Tensor:
    """The first *width* coordinates of the residual stream [..., d]."""
    return stream if stream.shape[-1] == width else stream[..., :width]


def widen_stream(hidden: Tensor, width: int) -> Tensor:
    """The residual stream [..., width] that begins with *hidden*, and 0 beyond it."""
    added = width - hidden.shape[-1]
    return F.pad(hidden, (0, added)) if added else hidden


def write_stream(stream: Tensor, hidden: Tensor) -> Tensor:
    """The residual stream [..., d] with *hidden* in place of its first coordinates."""
    width = hidden.shape[-1]
    return hidden if stream.shape[-1] == width else torch.cat((hidden, stream[..., width:]), -1)


class Transformer(nn.Module):
    """A decoder language model, or sequence classifier, built from a ModelConfig; see there for every switch.

    Its weights are torch's defaults until model.initialization.initialize sets them.
    checkpoint_activations keeps only each block's input and runs the block again in the backward pass.
    attention says what computes attention, see Kernel.
    fused changes no more than rounding. At t > 1 the loss has its own form, and at ZeRO stage 3 "all" is not
    possible. On a *grid* with t > 1 this is the part of the model that its rank holds; without one the model
    is whole. On one with c > 1 its rank computes a part of the positions: it is given whole sequences, and
    its results are those of whole sequences, the same on all c ranks. Gradients are c times those of its
    positions' share of the loss, to be averaged over the ranks as those of copies are.

    Raises UserError if t does not divide the widths of the model, or 2c its context length.
    """

    def __init__(
        self,
        config: ModelConfig,
        grid: ProcessGrid = ALONE,
        *,
        checkpoint_activations: bool = False,
        fused: Fused = "loss",
        attention: Kernel = "torch",
    ) -> None:
        super().__init__()
        self.config = config
        self.fused = fused
        # Replaced by what torch.compile makes of it, if the run is compiled.
        self.loss_and_residual = loss_and_residual
        self.loss_terms: Tensor | None = None
        """What the last loss is made of where there is a z_loss: [2], the mean cross entropy and what z_loss
        adds to it. None where the loss is the cross entropy."""
        self.checkpoint_activations = checkpoint_activations
        self.grid = grid
        t, c = grid.tensor_parallel, grid.context_parallel
        check_tensor_parallel(config, t, sequence_parallel=grid.sequence_parallel)
        check_context_parallel(config, c, t, sequence_parallel=grid.sequence_parallel)
        rows = config.padded_vocab_size(grid.tensor_parallel)
        self.token_embedding: nn.Module = token_embedding(rows, config.d_model, grid)
        self.position_embedding: nn.Embedding | None = None
        self.rotary: RotaryTables | None = None
        if config.positions == "learned":
            self.position_embedding = position_embedding(config.context_length, config.d_model, grid)
        else:
            self.rotary = RotaryTables(config.context_length, config.rope_scaling)
        self.layers = nn.ModuleList(
            Block(config, layer, grid, fused=fused == "all", attention=attention)
            for layer in range(config.num_layers)
        )
        for block in self.layers:
            attending = cast(Block, block).attention
            if attending is not None and attending.context is not None:
                attending.context.gathers_again = not checkpoint_activations
        self.final_norm = build_norm(config, config.d_model, grid)
        self.output: nn.Module | None = None
        self.classifier: nn.Linear | None = None
        """Head of a sequence classifier, the same on every rank of a tensor group."""
        if config.classes is not None:
            if grid.sequence_parallel:
                raise UserError(
                    "sequence_parallel: does not go with a sequence classifier, whose head reads one "
                    "position of each sequence; leave it out"
                )
            self.classifier = nn.Linear(config.d_model, config.classes, bias=False)
        elif not config.tie_embeddings:
            self.output = lm_head(config.d_model, rows, grid)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, document_offsets: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T] int64 -> logits [B, T, vocab_size], or with labels the mean loss, a scalar in nats.

        labels [B, T] int64: the token that follows each position (already shifted by the caller), -100 where
        nothing is to be predicted. T may be at most context_length; UserError otherwise.
        A sequence classifier has logits [B, T, classes], and its labels are classes: one a sequence, at its
        last token.

        document_offsets int32 [documents + 1]: where documents begin when the B rows are laid end to end,
        then B·T. Each row begins a document. No position then attends to another document, and positions
        count from 0 in each of them: the logits are those of separate forward passes, one per document. None
        means that each row is one document.
        """
        length = tokens.shape[1]
        if length > self.config.context_length:
            raise UserError(f"tokens: {length} positions exceed context_length {self.config.context_length}")
        grid = self.grid
        parts = grid.tensor_parallel if grid.sequence_parallel else 1
        multiple = position_multiple(grid.context_parallel, parts)
        if length % multiple:
            # Sampling, at any length. No other position attends to those added at the end.
            padding = (0, -length % multiple)
            tokens = F.pad(tokens, padding)
            if document_offsets is not None:
                document_offsets = extend_offsets(document_offsets, length, padding[1])
            if labels is not None:
                return self.forward(tokens, F.pad(labels, padding, value=IGNORED_LABEL), document_offsets)
            return self.forward(tokens, None, document_offsets)[:, :length]
        hidden, inputs = self.enter(tokens, document_offsets)
        for block, given in zip(self.layers, inputs, strict=True):
            if self.checkpoint_activations and torch.is_grad_enabled():
                hidden = cast(Tensor, checkpoint(block, hidden, *given, use_reentrant=False))
            else:
                hidden = block(hidden, *given)
        if labels is not None:
            return self.loss_of(hidden, labels)
        if self.classifier is not None:
            return cast(Tensor, self.classifier(self.lm_head_input(hidden)))
        logits = self.logits_of(hidden)
        if grid.tensor_parallel > 1:
            logits = gather_last(logits, grid.tensor_group)
        if grid.context_parallel > 1:
            logits = all_positions(logits, grid)
        return logits[..., : self.config.vocab_size]

    def enter(
        self, tokens: Tensor, document_offsets: Tensor | None = None
    ) -> tuple[Tensor, list[BlockInputs]]:
        """Tokens [B, T] -> the residual stream that enters the first block [B, T, d], and what each block
        gets besides the hidden states.

        T and document_offsets as in forward. With sequence or context parallelism the hidden states are this
        rank's part of T.
        """
        batch, length = tokens.shape
        hidden = self.token_embedding(own_positions(tokens, self.grid, 1))
        documents = None
        if document_offsets is not None:
            documents = PackedDocuments(document_offsets, batch, length, hidden.dtype)
        if self.position_embedding is not None:
            positions = documents.positions if documents else torch.arange(length, device=tokens.device)
            hidden = hidden + self.position_embedding(own_positions(positions, self.grid, -1))
        hidden = widen_stream(hidden, self.config.stream_width)
        masks: dict[int | None, Tensor | None] = {}  # layers with the same window share one
        tables: dict[tuple[int, float] | None, Table | None] = {}  # and those with the same rotation
        inputs = []
        for layer, block in enumerate(self.layers):
            attention = cast(Block, block).attention
            if attention is None:
                inputs.append(BlockInputs())
                continue
            window, mask, offsets = self.config.layer_window(layer), None, None
            rotary = self.config.layer_rotary(layer)
            if rotary not in tables:
                tables[rotary] = self._own_table(layer, hidden, length, documents)
            table = tables[rotary]
            context = attention.context
            gathers = context is not None and context.ranks > 1
            if documents is None:
                if window not in masks and not gathers:
                    masks[window] = local_mask(length, window, hidden.device)
                mask = None if gathers else masks[window]
            elif attention.takes_offsets(hidden, batch, length // self.grid.context_parallel):
                offsets = documents.offsets
            else:
                rows = context.positions(length, hidden.device) if context is not None and gathers else None
                mask = documents.mask(window, rows)
            inputs.append(BlockInputs(table, mask, offsets))
        return hidden, inputs

    def _own_table(
        self, layer: int, hidden: Tensor, length: int, documents: PackedDocuments | None
    ) -> Table | None:
        """The layer's rotary table of the positions that this rank holds of T = *length*."""
        table, rotary = self.table(layer, hidden, 0, length), self.config.layer_rotary(layer)
        if table is None or rotary is None:
            return None
        if documents is not None:
            table = documents.table(rotary, table)
        cosines, sines = (own_positions(part, self.grid, -3) for part in table)
        return cosines, sines

    def table(self, layer: int, hidden: Tensor, start: int, stop: int) -> Table | None:
        """The layer's rotary table of positions [start, stop) for these hidden states, or None."""
        rotary = self.config.layer_rotary(layer)
        if self.rotary is None or rotary is None:
            return None
        return table_rows(self.rotary.get(*rotary, stop, hidden.device, hidden.dtype), start, stop)

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The last block's output [B, T, d] and labels [B, T] -> mean loss in nats: final norm, head, cross
        entropy, and in training mode z_loss. With context parallelism the output is that of this rank's
        positions, and the loss that of all."""
        if self.grid.context_parallel > 1:
            own = own_positions(labels, self.grid, 1)
            count = (labels != IGNORED_LABEL).sum().clamp(min=1)
            share = (own != IGNORED_LABEL).sum() / count.double()
            loss = self._loss_of_own(hidden, own)
            if self.loss_terms is not None:
                terms = (self.loss_terms * share).to(self.loss_terms.dtype)
                self.loss_terms = cast(Tensor, sum_of_shares(terms, self.grid.context_group))
            return cast(Tensor, sum_of_shares((loss * share).to(loss.dtype), self.grid.context_group))
        return self._loss_of_own(hidden, labels)

    def _loss_of_own(self, hidden: Tensor, labels: Tensor) -> Tensor:
        vocab_size, softcap = self.config.vocab_size, self.config.logit_softcap
        z_loss = self.config.z_loss if self.training else 0.0
        self.loss_terms = None
        if self.classifier is not None:
            return cross_entropy(
                self.classifier(self.lm_head_input(hidden)), labels, self.classifier.out_features
            )
        if self.grid.tensor_parallel > 1:
            return parallel_cross_entropy(
                self._raw_logits(hidden), labels, vocab_size, self.grid, softcap, z_loss, self._note_terms
            )
        if self.fused == "none":
            logits = self._raw_logits(hidden)
            return cross_entropy(logits, labels, vocab_size, softcap, z_loss, self._note_terms)
        loss = partial(
            lm_head_cross_entropy,
            labels=labels,
            vocab_size=vocab_size,
            softcap=softcap,
            z_loss=z_loss,
            step=self.loss_and_residual,
            report=self._note_terms,
        )
        return cast(Tensor, (self.output or self.token_embedding)(self.lm_head_input(hidden), loss=loss))

    def _note_terms(self, terms: Tensor) -> None:
        self.loss_terms = terms

    def lm_head_input(self, hidden: Tensor) -> Tensor:
        """The last block's output [B, T, d] -> what the LM head reads: the final norm of its first d_model
        coordinates, divided by the width's ratio with parametrization mup."""
        read, ratio = read_stream(hidden, self.config.d_model), self.config.width_ratio
        normed = cast(Tensor, self.final_norm(read))
        return normed if ratio == 1 else normed / ratio

    def logits_of(self, hidden: Tensor) -> Tensor:
        """The last block's output [B, T, d] -> this rank's logits [B, T, padded vocabulary / t]."""
        logits = self._raw_logits(hidden)
        return (
            logits if self.config.logit_softcap is None else apply_softcap(logits, self.config.logit_softcap)
        )

    def _raw_logits(self, hidden: Tensor) -> Tensor:
        hidden = enter_columns(self.lm_head_input(hidden), self.grid)
        if self.output is not None:
            return cast(Tensor, self.output(hidden))
        return cast(Tensor, self.token_embedding(hidden, as_lm_head=True))
