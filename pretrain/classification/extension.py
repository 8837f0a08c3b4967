"""Classification as an extension of a run: its data, and accuracy as its validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.state import TrainingState
from pretrain.classification.accuracy import Accuracy, AccuracyResult
from pretrain.classification.corpus import prepare_builtin_labelled
from pretrain.classification.examples import LabelledSequences, classes_of, held_out_examples
from pretrain.config.run_config import RunConfig
from pretrain.run.data import RunData
from pretrain.run.extension import Extension
from pretrain.run.hooks import Hook, HookResult, IntervalHook
from pretrain.run.session import Session
from pretrain.utils.text import labelled


@dataclass(frozen=True)
class LabelledData(RunData):
    """A labelled corpus: its documents are examples of classes."""

    is_text = False

    def model_fields(self) -> dict[str, Any]:
        """The vocabulary, and the number of classes. UserError if the corpus has no labels."""
        return super().model_fields() | {"classes": len(classes_of(self.corpora[0][0]))}

    def training_sequences(self, context_length: int, seed: int) -> Any:
        """The run's endless stream of examples."""
        return LabelledSequences(self.corpora, context_length, seed)


class AccuracyHook(IntervalHook):
    """A classifier's validation: accuracy and loss on held-out examples, when a ValidationHook would be
    due."""

    name = "validation"

    def __init__(self, session: Session) -> None:
        run, T = session.run, session.model.context_length
        corpus = session.data.corpora[0][0]
        inputs, labels = session.world.once(lambda: held_out_examples(corpus, T, run.validation.sequences))
        self._accuracy = Accuracy(inputs, labels, session.batch.micro_batch, session.world)
        super().__init__(run.validation.every, run.steps)
        self.result: AccuracyResult | None = None
        """The newest result of this session."""

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """Return ``val_loss`` in nats per example, ``val_accuracy`` as a share."""
        self.result = self._accuracy.run(engine)
        return HookResult({"val_loss": self.result.loss, "val_accuracy": self.result.accuracy})

    def closing(self, session: Session) -> list[str]:
        """The newest result, and what naming one class reaches."""
        result = self.result
        if result is None:
            return []
        return [
            labelled(
                "result",
                f"accuracy {result.accuracy:.2%}, validation loss {result.loss:.4f} nats per example",
            ),
            labelled(
                "compare",
                f"always the most frequent class: accuracy {result.most_frequent:.2%} of the same "
                f"{result.examples:,} examples",
            ),
        ]


class Classification(Extension):
    """What classification brings to a run."""

    name = "classification"

    def built_in_data(self, run: RunConfig, report: Callable[[object], None]) -> Path | None:
        """Snippets of Python's standard library, labelled by package."""
        if run.task != "classification":
            return None
        return prepare_builtin_labelled(run.data_root, run.vocab_size, report)

    def data(self, run: RunConfig, data: RunData) -> RunData:
        """The corpora with their labels."""
        return LabelledData(data.corpora, data.validation) if run.task == "classification" else data

    def validation(self, session: Session) -> Hook | None:
        """Accuracy in place of the loss on windows."""
        return AccuracyHook(session) if session.run.task == "classification" else None
