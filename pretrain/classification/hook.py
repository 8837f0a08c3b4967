"""Validation of a classifier, as a hook of the trainer: accuracy and loss on held-out examples, shared among
the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from model.loss import IGNORED_LABEL
from pretrain.checkpoint.state import TrainingState
from pretrain.classification.examples import held_out_examples
from pretrain.data.held_out import HeldOutBatches
from pretrain.run.hooks import HookResult, IntervalHook
from pretrain.run.session import Session
from pretrain.runtime.world import World
from pretrain.utils.format import log_line


class AccuracyHook(IntervalHook):
    """A classifier's validation: accuracy and loss on held-out examples, when a ValidationHook would be
    due."""

    name = "validation"

    def __init__(self, session: Session) -> None:
        run, T = session.run, session.model_config.context_length
        corpus = session.data.corpora[0][0]
        inputs, labels = session.world.on_rank_zero(
            lambda: held_out_examples(corpus, T, run.validation.sequences)
        )
        self._accuracy = Accuracy(inputs, labels, session.batch.micro_batch, session.world)
        super().__init__(run.validation.every, run.steps)
        self.result: AccuracyResult | None = None
        """The newest result of this session."""

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Return ``val_loss`` in nats per example, ``val_accuracy`` as a share."""
        self.result = self._accuracy.run(engine)
        return HookResult({"val_loss": self.result.loss, "val_accuracy": self.result.accuracy})

    def summarize(self, session: Session) -> list[str]:
        """The newest result, and what naming one class reaches."""
        result = self.result
        if result is None:
            return []
        return [
            log_line(
                "result",
                f"accuracy {result.accuracy:.2%}, validation loss {result.loss:.4f} nats per example",
            ),
            log_line(
                "compare",
                f"always the most frequent class: accuracy {result.most_frequent:.2%} of the same "
                f"{result.examples:,} examples",
            ),
        ]


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
            terms = torch.stack([losses, (logits.argmax(1) == classes).double(), torch.ones_like(losses)], 1)
            total += terms[present.to(logits.device)].sum(0)
        engine.train()
        nats, right, count = self.world.sum(total).tolist()
        return AccuracyResult(nats / count, right / count, self.batches.count, self.most_frequent)
