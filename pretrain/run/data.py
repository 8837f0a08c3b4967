"""A run's corpora: opened, combined by weight, and identified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.blend import parse_blend
from pretrain.data.corpus import Corpus
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.pipeline import prepare_builtin


@dataclass(frozen=True)
class RunData:
    """The corpora of a run and their weights."""

    corpora: list[tuple[Corpus, Fraction]]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all corpora share."""
        return self.corpora[0][0].tokenizer

    def training_sequences(self, context_length: int, seed: int) -> TrainingSequences:
        """The run's endless stream of sequences."""
        return TrainingSequences(self.corpora, context_length, seed)

    def validation_windows(self, context_length: int, count: int) -> tuple[np.ndarray, int]:
        """Held-out windows, shared among the corpora by weight.

        Returns:
            Token ids [n, T+1] and the UTF-8 bytes of all labels.
        """
        sets = self._validation_sets(context_length, count)
        return np.concatenate([s.batch(0, len(s)) for s in sets]), sum(s.label_bytes() for s in sets)

    def validation_documents(self, context_length: int, count: int) -> list[np.ndarray]:
        """Of each of the validation windows, where documents begin among its T inputs, int64, 0 being the first."""
        sets = self._validation_sets(context_length, count)
        return [starts for s in sets for starts in s.document_starts()]

    def _validation_sets(self, context_length: int, count: int) -> list[ValidationSequences]:
        total = sum(weight for _, weight in self.corpora)
        return [
            ValidationSequences(corpus, context_length, max(1, round(count * weight / total)))
            for corpus, weight in self.corpora
        ]

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: a run resumes only on the same."""
        total = sum(weight for _, weight in self.corpora)
        return {
            "tokenizer": self.corpora[0][0].meta["tokenizer"]["hash"],
            "data": [[corpus.meta["content_hash"], str(weight / total)] for corpus, weight in self.corpora],
        }


def open_data(run: RunConfig, report: Callable[[object], None]) -> RunData:
    """Open the run's corpora; the built-in one is made first if need be (one process works, the others wait).

    Args:
        report: is given progress to print.

    Raises:
        UserError: a folder that is no corpus, another tokenizer than the run's, weights that are no numbers.
    """
    if run.data == "builtin":
        if run.tokenizer is not None:
            raise UserError(
                "tokenizer: the built-in corpus has its own (--vocab_size N); for another: python -m pretrain.prepare "
                f"--dataset builtin --tokenizer {run.tokenizer} --out data/NAME, then --data data/NAME"
            )
        try:
            folder = prepare_builtin(run.data_root, run.vocab_size, report)
        except OSError as error:
            raise UserError(
                f"data_root: the built-in corpus cannot be written to {run.data_root!r} ({error.strerror or error}); "
                "give another folder"
            ) from None
        return RunData([(Corpus.open(folder), Fraction(1))])
    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer is not None else None
    return RunData([(Corpus.open(folder, tokenizer), weight) for folder, weight in parse_blend(run.data)])
