"""Computes a classifier's accuracy and loss on held-out examples, shared among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from model.loss import IGNORED_LABEL
from pretrain.data.held_out import HeldOutBatches
from pretrain.runtime.world import World


@dataclass(frozen=True)
class AccuracyResult:
    """What a classifier reaches on a set of examples."""

    loss: float
    """Nats per example."""
    accuracy: float
    """Share of the examples whose class has the largest logit."""
    examples: int
    most_frequent: float
    """Share of the class with most examples: what always naming it would reach."""


class Accuracy:
    """Measures a classifier on fixed examples.

    Args:
        inputs, labels: int64 [n, T] each, as pretrain.classification.examples.Examples.rows gives them.
        micro_batch: examples per forward pass.
    """

    def __init__(self, inputs: np.ndarray, labels: np.ndarray, micro_batch: int, world: World) -> None:
        # HeldOutBatches cuts windows of T + 1 tokens; nothing is read of the last column.
        self.batches = HeldOutBatches(np.pad(inputs, ((0, 0), (0, 1))), micro_batch, world)
        ends = (labels != IGNORED_LABEL).argmax(axis=1)
        classes = labels[np.arange(len(labels)), ends]
        self.ends, self.classes = torch.from_numpy(ends), torch.from_numpy(classes)  # [n] each
        self.most_frequent = float(np.bincount(classes).max() / len(classes))
        self.world = world

    @torch.no_grad()
    def run(self, engine: Any) -> AccuracyResult:
        """Measure. Collective; weights and training numbers do not change."""
        total = torch.zeros(3, dtype=torch.float64, device=self.world.device)  # nats, right ones, examples
        engine.eval()
        for batch in self.batches:
            rows, present = batch.rows, batch.present
            logits = engine(batch.inputs.to(self.world.device))[torch.arange(len(rows)), self.ends[rows]]
            classes = self.classes[rows].to(logits.device)
            losses = F.cross_entropy(logits.double(), classes, reduction="none")
            figures = torch.stack(
                [losses, (logits.argmax(1) == classes).double(), torch.ones_like(losses)], 1
            )
            total += figures[present.to(logits.device)].sum(0)
        engine.train()
        nats, right, count = self.world.sum(total).tolist()
        return AccuracyResult(nats / count, right / count, self.batches.count, self.most_frequent)
