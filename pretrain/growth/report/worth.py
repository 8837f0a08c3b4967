"""What every head is worth: how much the held-out loss rises when the head's output is removed, nothing else
changed.

A removed head's columns of the o projection's input are zero. The bias of that projection stays. The model is
not trained again after a removal, so other heads cannot take over: what is found removable is so as the model
stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model.attention import BlockInputs
from model.errors import UserError
from model.head_loss import loss_and_residual, token_chunks
from model.loss import IGNORED_LABEL
from model.transformer import Block, Transformer
from pretrain.data.sequences import pack_documents

Head = tuple[int, int]
"""Layer and number of a head, both from 0."""
Progress = Callable[[int, int], None]
"""Is called with the number of passes done, and with that of all."""

TOKENS_AT_ONCE = {"cpu": 2**13, "cuda": 2**16}
"""Tokens of one forward pass, by device type: at least one window is read at a time."""
CURVE_POINTS = 10
"""Points of the removal curve after the whole model: 10 %, 20 %, … of all heads."""
SMALL_INCREASE = 0.01
"""Up to this relative increase of the loss, heads count as removable."""
SMALL_SHARE = 0.01
"""A head whose worth is below this share of the largest head's is worth little."""


@dataclass(frozen=True)
class RemovalPoint:
    """The loss without the heads of smallest worth."""

    removed: int
    """Number of heads removed, all at once."""
    share: float
    """That number over the number of all heads."""
    loss: float
    """Nats per token."""
    increase: float
    """Relative to the loss of the whole model: 0.01 is one per cent more."""


@dataclass(frozen=True)
class HeadWorths:
    """Worth of every head, in nats per token (or example): the loss without it minus the loss of the whole
    model."""

    loss: float
    """Loss of the whole model on the same windows, nats per token."""
    windows: int
    tokens: int
    """Labels of all windows; a classifier's examples have one each."""
    worths: list[list[float]]
    """By layer and head. A negative one says that the model is better without that head."""
    errors: list[list[float]]
    """Standard errors of the worths over windows, in nats per token; NaN for a single window."""
    curve: list[RemovalPoint]
    """From the whole model to the model without heads."""

    @property
    def per(self) -> str:
        """What losses are means over: tokens, or a classifier's examples, which have one label each."""
        return "example" if self.tokens == self.windows else "token"

    @property
    def removable(self) -> RemovalPoint:
        """The point of the curve with most heads removed and a loss increase of at most SMALL_INCREASE."""
        return max((p for p in self.curve if p.increase <= SMALL_INCREASE), key=lambda point: point.removed)


def measure_worths(
    network: Transformer,
    inputs: np.ndarray,
    labels: np.ndarray,
    document_starts: Sequence[np.ndarray] | None = None,
    points: int = CURVE_POINTS,
    progress: Progress | None = None,
) -> HeadWorths:
    """Remove every head alone, then more and more of those of smallest worth together.

    Args:
        network: whole (t = 1), in evaluation mode.
        inputs, labels: as Transformer.forward takes them, int64 [n, T] each.
        document_starts: where documents begin among each window's inputs, for models trained with a document
            mask.
        points: of the removal curve, besides the whole model.
        progress: called after every pass over a batch of windows.

    Raises:
        UserError: the whole model's loss is not finite.
    """
    heads = [(layer, head) for layer, count in enumerate(network.config.heads) for head in range(count)]
    single: list[frozenset[Head]] = [frozenset(), *(frozenset({head}) for head in heads)]
    counts = sorted({round(len(heads) * point / points) for point in range(1, points + 1)} - {0})
    ablation = Ablation(network, inputs, labels, document_starts)
    ablation.expect(len(single) + len(counts), progress)
    losses = ablation.losses(single)
    whole, differences = losses[0], losses[1:] - losses[0]  # [n], [heads, n]
    if not whole.isfinite().all():
        raise UserError(
            f"loss: that of the whole model on held-out text is {whole.mean().item()}, so no head has a "
            "worth; give an earlier step"
        )
    worths = differences.mean(1)
    deviations = differences.std(1) if len(whole) > 1 else torch.full((len(heads),), math.nan)
    order = [head for _, head in sorted(zip(worths.tolist(), heads, strict=True))]
    reduced = ablation.losses([frozenset(order[:count]) for count in counts])
    loss = whole.mean().item()
    curve = [
        RemovalPoint(count, count / len(heads), value, value / loss - 1)
        for count, value in zip([0, *counts], [loss, *reduced.mean(1).tolist()], strict=True)
    ]
    by_layer = list(network.config.heads)
    return HeadWorths(
        loss=loss,
        windows=len(inputs),
        tokens=int((labels != IGNORED_LABEL).sum()),
        worths=[part.tolist() for part in worths.split(by_layer)],
        errors=[part.tolist() for part in (deviations / math.sqrt(len(whole))).split(by_layer)],
        curve=curve,
    )


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
        self.device = next(network.parameters()).device
        self.inputs, self.labels = (torch.from_numpy(part.astype(np.int64)) for part in (inputs, labels))
        self.length = inputs.shape[1]
        self.document_starts = document_starts
        at_once = TOKENS_AT_ONCE.get(self.device.type, TOKENS_AT_ONCE["cpu"])
        self.micro_batch = max(1, at_once // self.length)
        self.expect(0, None)

    def expect(self, sets: int, progress: Progress | None) -> None:
        """Report every pass from now on, of those that ``losses`` makes for so many sets of heads."""
        passes = itertools.count(1)
        total = sets * math.ceil(len(self.inputs) / self.micro_batch)
        self.passed = (lambda: progress(next(passes), total)) if progress else lambda: None

    @torch.no_grad()
    def losses(self, sets: Sequence[Iterable[Head]]) -> Tensor:
        """The loss of each window without each set of heads, fp64 [sets, n] on the CPU, nats per token.

        Every set is computed by the same operations on tensors of the same shapes, so a head that adds
        nothing makes a difference of exactly zero.
        """
        removed, layers = [sorted(set(heads)) for heads in sets], self.config.num_layers
        lowest = [heads[0][0] if heads else layers for heads in removed]
        batches = []
        for first in range(0, len(self.inputs), self.micro_batch):
            rows = range(first, min(first + self.micro_batch, len(self.inputs)))
            hidden, inputs = self._enter(self.inputs[first : rows.stop].to(self.device), rows)
            labels = self.labels[first : rows.stop].to(self.device)
            losses = torch.empty(len(removed), len(labels), dtype=torch.float64)
            for layer in range(layers + 1):
                for index in (i for i, start in enumerate(lowest) if start == layer):
                    with self._without(removed[index]):
                        losses[index] = self._loss(self._run(hidden, inputs, range(layer, layers)), labels)
                    self.passed()
                hidden = self._run(hidden, inputs, range(layer, min(layer + 1, layers)))
            batches.append(losses)
        return torch.cat(batches, dim=1)

    def _enter(self, tokens: Tensor, rows: range) -> tuple[Tensor, list[BlockInputs]]:
        """What enters the first layer, and what each layer gets besides, of the windows *rows*."""
        if self.document_starts is None:
            return self.network.enter(tokens)
        offsets = pack_documents([self.document_starts[row] for row in rows], self.length)
        return self.network.enter(tokens, torch.from_numpy(offsets).to(self.device))

    def _run(self, hidden: Tensor, inputs: Sequence[BlockInputs], layers: range) -> Tensor:
        """Hidden [B, T, d] through these layers."""
        for layer in layers:
            hidden = self._block(layer)(hidden, *inputs[layer])
        return hidden

    def _block(self, layer: int) -> Block:
        return cast(Block, self.network.layers[layer])

    def _without(self, heads: Sequence[Head]) -> ExitStack:
        """Until the end of the context, the o projections read zeros in the columns of these heads."""
        hooks = ExitStack()
        for layer in {layer for layer, _ in heads}:
            kept = torch.ones(self.config.heads[layer], device=self.device, dtype=torch.bool)
            kept[[head for place, head in heads if place == layer]] = False
            columns = kept.repeat_interleave(self.config.layer_head_dim(layer))

            def zero(_: object, inputs: tuple[Tensor], columns: Tensor = columns) -> tuple[Tensor]:
                return (inputs[0].where(columns, 0),)

            hooks.callback(self._block(layer).attention.o.register_forward_pre_hook(zero).remove)
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
            losses = [
                loss_and_residual(flat[rows] @ weight.t(), targets[rows], columns, False) for rows in chunks
            ]
            sums = torch.cat(losses).double().view_as(labels).where(counted, 0).sum(1)
            return sums / counted.sum(1)

        hidden = self.network.final_norm(hidden)
        if self.network.classifier is not None:
            return row_losses(hidden, self.network.classifier.weight).cpu()
        head = self.network.output or self.network.token_embedding
        return cast(Tensor, head(hidden, loss=row_losses)).cpu()
