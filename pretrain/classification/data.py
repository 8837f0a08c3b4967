"""A run's data for sequence classification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretrain.classification.examples import LabelledSequences, read_classes
from pretrain.run.data import RunData


@dataclass(frozen=True)
class LabelledData(RunData):
    """A labelled corpus: its documents are examples of classes."""

    is_text = False

    def model_fields(self) -> dict[str, Any]:
        """The vocabulary, and the number of classes. UserError if the corpus has no labels."""
        return super().model_fields() | {"classes": len(read_classes(self.corpora[0][0]))}

    def training_sequences(self, context_length: int, seed: int) -> Any:
        """The run's endless stream of examples."""
        return LabelledSequences(self.corpora, context_length, seed)
