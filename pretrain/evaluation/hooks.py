"""Validation, accuracy and zero-shot scores as hooks of the trainer."""

from __future__ import annotations

from typing import Any

from pretrain.checkpoint.state import TrainingState
from pretrain.evaluation.accuracy import Accuracy, AccuracyResult
from pretrain.evaluation.validation import Validation, ValidationResult
from pretrain.run.context import RunContext
from pretrain.run.hooks import Hook, HookResult, every


class ValidationHook(Hook):
    """Loss on the run's held-out windows, every ``validation.every`` steps and at the last."""

    name = "validation"

    def __init__(self, context: RunContext) -> None:
        run, count = context.run, context.run.validation.sequences
        windows, label_bytes = context.validation_windows(count)
        documents = context.validation_documents(count) if run.document_mask else None
        self._validation = Validation(
            windows, label_bytes, context.batch.micro_batch, context.world, documents
        )
        self._interval, self._last = run.validation.every, run.steps
        self.result: ValidationResult | None = None
        """The newest result of this session."""

    def due(self, step: int) -> bool:
        """Whether *step* is a multiple of ``validation.every``, or the last."""
        return every(self._interval, step, self._last)

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Return ``val_loss`` in nats per token, ``val_bpb`` in bits per byte."""
        self.result = self._validation.run(engine)
        return HookResult({"val_loss": self.result.loss, "val_bpb": self.result.bpb})


class AccuracyHook(Hook):
    """A classifier's validation: accuracy and loss on held-out examples, when a ValidationHook would be due."""

    name = "validation"

    def __init__(self, context: RunContext) -> None:
        run = context.run
        inputs, labels = context.held_out_examples(run.validation.sequences)
        self._accuracy = Accuracy(inputs, labels, context.batch.micro_batch, context.world)
        self._interval, self._last = run.validation.every, run.steps
        self.result: AccuracyResult | None = None
        """The newest result of this session."""

    def due(self, step: int) -> bool:
        """Whether *step* is a multiple of ``validation.every``, or the last."""
        return every(self._interval, step, self._last)

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Return ``val_loss`` in nats per example, ``val_accuracy`` as a share."""
        self.result = self._accuracy.run(engine)
        return HookResult({"val_loss": self.result.loss, "val_accuracy": self.result.accuracy})


class EvaluationHook(Hook):
    """Zero-shot scores through lm-eval, every ``evaluation.every`` steps and at the last.

    Raises:
        UserError: on every rank, for tasks that cannot be run.
    """

    name = "evaluation"

    def __init__(self, context: RunContext) -> None:
        from pretrain.evaluation.in_loop import InLoopEvaluation  # lm-eval takes seconds to import

        run, T = context.run, context.model.context_length
        self._evaluation = InLoopEvaluation(
            run.evaluation, context.data.tokenizer, T, context.batch.micro_batch * T, context.world
        )
        self._interval, self._last = run.evaluation.every, run.steps

    def due(self, step: int) -> bool:
        """Whether *step* is a multiple of ``evaluation.every``, or the last."""
        return every(self._interval, step, self._last)

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Return ``evaluation/TASK/METRIC`` of each task, and a line with them."""
        scores = self._evaluation.run(engine)
        return HookResult(scores.figures, [f"scores   step {state.step:,}: {scores}"])
