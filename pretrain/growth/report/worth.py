"""What every head is worth: how much the held-out loss rises when the head's output is removed, nothing else
changed.

A removed head's columns of the o projection's input are zero. The bias of that projection stays. The model is
not trained again after a removal, so other heads cannot take over: what is found removable is so as the model
stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from model.attention import BlockInputs
from model.errors import UserError
from model.lm_head_loss import loss_and_residual, token_chunks
from model.loss import IGNORED_LABEL
from model.transformer import Block, Transformer
from pretrain.data.sequences import pack_documents
from pretrain.utils.format import ProgressLine

Head = tuple[int, int]
"""Layer and number of a head, both from 0."""

TOKENS_AT_ONCE = {"cpu": 2**13, "cuda": 2**16}
"""Tokens of one forward pass, by device type: at least one window is read at a time."""
CURVE_POINTS = 10
"""Points of the removal curve after the whole model: 10 %, 20 %, … of all heads."""
SMALL_INCREASE = 0.01
"""Up to this relative increase of the loss, heads count as removable."""
SMALL_SHARE = 0.01
"""A head whose worth is below this share of the largest head's is worth little."""


@dataclass(frozen=True)
class HeadWorths:
    """Worth of every head, in nats per token (or example): the loss without it minus the loss of the whole
    model."""

    loss: float
    """Loss of the whole model on the same windows, nats per token."""
    windows: int
    tokens: int
    """Labels of all windows; a classifier's examples have one each."""
    heads: pd.DataFrame
    """A row for each head: its ``layer``; its ``worth`` (a negative one says that the model is better without
    that head); the standard ``error`` of the worth over windows, NaN for a single window; in a model with
    gates on attention the mean ``gate`` of the head over all tokens."""
    curve: pd.DataFrame
    """From the whole model to the model without heads: how many heads of smallest worth are ``removed`` at
    once, their ``share`` of all, the ``loss``, and its ``increase`` relative to that of the whole model."""

    @property
    def per(self) -> str:
        """What losses are means over: tokens, or a classifier's examples, which have one label each."""
        return "example" if self.tokens == self.windows else "token"

    @property
    def removable(self) -> pd.Series:
        """The row of the curve with most heads removed and a loss increase of at most SMALL_INCREASE."""
        return self.curve[self.curve["increase"] <= SMALL_INCREASE].iloc[-1]


def measure_worths(
    network: Transformer,
    inputs: np.ndarray,
    labels: np.ndarray,
    document_starts: Sequence[np.ndarray] | None = None,
    points: int = CURVE_POINTS,
) -> HeadWorths:
    """Remove every head alone, then more and more of those of smallest worth together.

    Args:
        network: whole (t = 1), in evaluation mode.
        inputs, labels: as Transformer.forward takes them, int64 [n, T] each.
        document_starts: where documents begin among each window's inputs, for models trained with a document
            mask.
        points: of the removal curve, besides the whole model.

    Raises:
        UserError: the whole model's loss is not finite.
    """
    heads = [(layer, head) for layer, count in enumerate(network.config.heads) for head in range(count)]
    ablation = Ablation(network, inputs, labels, document_starts)
    losses = ablation.losses([[], *([head] for head in heads)])
    gates = ablation.mean_gates() if network.config.attention_gate != "none" else None
    whole, differences = losses[0], losses[1:] - losses[0]  # [n], [heads, n]
    if not whole.isfinite().all():
        raise UserError(
            f"loss: that of the whole model on held-out text is {whole.mean().item()}, so no head has a "
            "worth; give an earlier step"
        )
    worths = differences.mean(1)
    deviations = differences.std(1) if len(whole) > 1 else torch.full((len(heads),), math.nan)
    order = [head for _, head in sorted(zip(worths.tolist(), heads, strict=True))]
    counts = sorted({round(len(heads) * point / points) for point in range(1, points + 1)} - {0})
    reduced = ablation.losses([order[:count] for count in counts])
    curve = pd.DataFrame({"removed": [0, *counts]})
    curve["share"] = curve["removed"] / len(heads)
    curve["loss"] = [whole.mean().item(), *reduced.mean(1).tolist()]
    curve["increase"] = curve["loss"] / curve["loss"][0] - 1
    errors = deviations / math.sqrt(len(whole))
    by_head = {"layer": [layer for layer, _ in heads], "worth": worths.tolist(), "error": errors.tolist()}
    if gates is not None:
        by_head["gate"] = gates
    tokens = int((labels != IGNORED_LABEL).sum())
    return HeadWorths(curve["loss"][0], len(inputs), tokens, pd.DataFrame(by_head), curve)


class Ablation:
    """Computes the loss of a network on fixed windows without some of its heads.

    What enters a layer does not depend on the heads of that layer and those above it. So each batch runs
    through the whole network once, and for every set of heads through the layers from the lowest one of the
    set.

    Args: as measure_worths.
    """

    def __init__(
        self,
        network: Transformer,
        inputs: np.ndarray,
        labels: np.ndarray,
        document_starts: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.network, self.config = network, network.config
        self.blocks = cast(list[Block], list(network.layers))
        self.device = next(network.parameters()).device
        self.inputs, self.labels = (torch.from_numpy(part.astype(np.int64)) for part in (inputs, labels))
        self.length = inputs.shape[1]
        self.document_starts = document_starts
        at_once = TOKENS_AT_ONCE.get(self.device.type, TOKENS_AT_ONCE["cpu"])
        self.micro_batch = max(1, at_once // self.length)

    @torch.no_grad()
    def losses(self, sets: Sequence[Iterable[Head]]) -> Tensor:
        """The loss of each window without each set of heads, fp64 [sets, n] on the CPU, nats per token.

        Every set is computed by the same operations on tensors of the same shapes, so a head that adds
        nothing makes a difference of exactly zero.
        """
        removed, layers = [sorted(set(heads)) for heads in sets], self.config.num_layers
        lowest = [heads[0][0] if heads else layers for heads in removed]
        found = torch.empty(len(removed), len(self.inputs), dtype=torch.float64)
        done, passes = 0, len(removed) * math.ceil(len(self.inputs) / self.micro_batch)
        with ProgressLine("heads removed", "pass") as progress:
            for first in range(0, len(self.inputs), self.micro_batch):
                rows = range(len(self.inputs))[first : first + self.micro_batch]
                hidden, inputs = self._enter(self.inputs[rows.start : rows.stop].to(self.device), rows)
                labels = self.labels[rows.start : rows.stop].to(self.device)
                for layer in range(layers + 1):
                    for index in (i for i, start in enumerate(lowest) if start == layer):
                        with self._remove_heads(removed[index]):
                            last = self._run(hidden, inputs, range(layer, layers))
                            found[index, rows.start : rows.stop] = self._loss(last, labels)
                        done += 1
                        progress(done, passes)
                    hidden = self._run(hidden, inputs, range(layer, min(layer + 1, layers)))
        return found

    def mean_gates(self) -> list[float]:
        """The mean gate of every head over all tokens of the windows; of gates on elements, over its own."""
        found = [torch.zeros(count, dtype=torch.float64) for count in self.config.heads]

        def note(layer: int, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            gates = output if self.config.attention_gate == "head" else output.sigmoid()  # [B, T, A]
            by_head = gates.double().unflatten(2, (len(found[layer]), -1)).mean(3)
            found[layer] += by_head.sum((0, 1)).cpu() / self.inputs.numel()

        with ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                if block.attention is not None:
                    gate = block.attention.head_gate or block.attention.gate
                    assert gate is not None
                    hooks.callback(gate.register_forward_hook(partial(note, layer)).remove)
            for first in range(0, len(self.inputs), self.micro_batch):
                rows = range(len(self.inputs))[first : first + self.micro_batch]
                with torch.no_grad():
                    given = self._enter(self.inputs[rows.start : rows.stop].to(self.device), rows)
                    self._run(*given, range(self.config.num_layers))
        return torch.cat(found).tolist()

    def _enter(self, tokens: Tensor, rows: range) -> tuple[Tensor, list[BlockInputs]]:
        """What enters the first layer, and what each layer gets besides, of the windows *rows*."""
        if self.document_starts is None:
            return self.network.enter(tokens)
        offsets = pack_documents([self.document_starts[row] for row in rows], self.length)
        return self.network.enter(tokens, torch.from_numpy(offsets).to(self.device))

    def _run(self, hidden: Tensor, inputs: Sequence[BlockInputs], layers: range) -> Tensor:
        """Hidden [B, T, d] through these layers."""
        for layer in layers:
            hidden = self.blocks[layer](hidden, *inputs[layer])
        return hidden

    def _remove_heads(self, heads: Sequence[Head]) -> ExitStack:
        """Until the end of the context, the o projections read zeros in the columns of these heads."""
        hooks = ExitStack()
        for layer in {layer for layer, _ in heads}:
            kept = torch.ones(self.config.heads[layer], device=self.device, dtype=torch.bool)
            kept[[head for place, head in heads if place == layer]] = False
            columns = kept.repeat_interleave(self.config.layer_head_dim(layer))

            def zero(_: object, inputs: tuple[Tensor], columns: Tensor = columns) -> tuple[Tensor]:
                return (inputs[0].where(columns, 0),)

            attention = self.blocks[layer].attention
            assert attention is not None
            hooks.callback(attention.o.register_forward_pre_hook(zero).remove)
        return hooks

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The last block's output [B, T, d] and labels [B, T] -> mean loss of each row, fp64 [B].

        Sums are in fp64: a head's worth may be far below the rounding of a mean in fp32.
        """
        counted = labels != IGNORED_LABEL
        columns = self.config.classes or self.config.vocab_size

        def row_losses(hidden: Tensor, weight: Tensor) -> Tensor:
            flat, targets = hidden.flatten(0, -2), labels.where(counted, 0).flatten()
            chunks = token_chunks(len(flat), len(weight), flat.device.type)
            softcap = self.config.logit_softcap
            losses = [
                loss_and_residual(flat[rows] @ weight.t(), targets[rows], columns, False, softcap)
                for rows in chunks
            ]
            sums = torch.cat(losses).double().view_as(labels).where(counted, 0).sum(1)
            return sums / counted.sum(1)

        hidden = self.network.lm_head_input(hidden)
        if self.network.classifier is not None:
            return row_losses(hidden, self.network.classifier.weight).cpu()
        head = self.network.output or self.network.token_embedding
        return cast(Tensor, head(hidden, loss=row_losses)).cpu()
