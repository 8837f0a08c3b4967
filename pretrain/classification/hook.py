"""Validation of a classifier, as a hook of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.state import TrainingState
from pretrain.classification.accuracy import Accuracy, AccuracyResult
from pretrain.classification.examples import held_out_examples
from pretrain.run.hooks import HookResult, IntervalHook
from pretrain.run.session import Session
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

    def run(self, engine: Any, state: TrainingState, figures: Mapping[str, Any]) -> HookResult:
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
