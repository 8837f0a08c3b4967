"""A run's corpora, combined by weight and identified."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from pretrain.checkpoint.state import DataIdentity
from pretrain.data.corpus import Corpus
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer


class Sequences(Protocol):
    """The endless stream of sequences that a run trains on: a function of the seed and the sequence's
    number."""

    corpora: list[Corpus]

    def epochs(self, sequences: int) -> list[float]:
        """How often the first *sequences* sequences read each corpus."""

    def inputs_and_labels(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences ``first … first + count - 1``: inputs and labels, int64 [count, T] each."""

    def document_offsets(self, first: int, count: int) -> np.ndarray:
        """Where documents begin in them, as Transformer.forward takes it."""

    def describe(self) -> str:
        """What is read, a line for each corpus."""


@dataclass(frozen=True)
class RunData:
    """The corpora of a run and their weights."""

    corpora: list[tuple[Corpus, Fraction]]
    validation: list[tuple[Corpus, Fraction]] | None = None
    """Corpora whose validation splits are used; None: those of ``corpora``."""

    is_text = True
    """Whether the model learns to continue text, so that it can be sampled from."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all corpora share."""
        return self.corpora[0][0].tokenizer

    def model_fields(self) -> dict[str, Any]:
        """Fields of ModelConfig that the data determine."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def training_sequences(self, context_length: int, seed: int) -> Sequences:
        """The run's endless stream of sequences."""
        return TrainingSequences(self.corpora, context_length, seed)

    def validation_windows(self, context_length: int, count: int) -> np.ndarray:
        """Held-out windows, shared among the corpora by weight: token ids [n, T+1]."""
        return np.concatenate([s.batch(0, len(s)) for s in self._validation_sets(context_length, count)])

    def validation_bytes(self, context_length: int, count: int) -> int:
        """UTF-8 bytes of all labels in those windows."""
        return sum(s.label_bytes() for s in self._validation_sets(context_length, count))

    def validation_documents(self, context_length: int, count: int) -> list[np.ndarray]:
        """For each validation window, the start of every document among its T inputs, int64; the first is
        0."""
        sets = self._validation_sets(context_length, count)
        return [starts for s in sets for starts in s.document_starts()]

    def _validation_sets(self, context_length: int, count: int) -> list[ValidationSequences]:
        corpora = self.validation or self.corpora
        total = sum(weight for _, weight in corpora)
        return [
            ValidationSequences(corpus, context_length, max(1, round(count * weight / total)))
            for corpus, weight in corpora
        ]

    def all_corpora(self) -> list[tuple[Corpus, Fraction]]:
        """Those that are trained on, and those that are only validated on."""
        return [*self.corpora, *(self.validation or [])]

    def contents(self) -> list[str]:
        """The hash of each corpus's documents."""
        return [corpus.meta.content_hash for corpus, _ in self.all_corpora()]

    def identity(self) -> DataIdentity:
        """What identifies the data: a run resumes only on the same data."""
        return DataIdentity(
            self.corpora[0][0].meta.tokenizer.hash,
            _shares(self.corpora),
            None if self.validation is None else _shares(self.validation),
        )


def _shares(corpora: list[tuple[Corpus, Fraction]]) -> list[tuple[str, str]]:
    total = sum(weight for _, weight in corpora)
    return [(corpus.meta.content_hash, str(weight / total)) for corpus, weight in corpora]
