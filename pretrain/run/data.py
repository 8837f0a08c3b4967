"""Opens a run's corpora, combines them by weight and identifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.blend import parse_blend
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.megatron import is_prefix
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.pipeline import prepare_builtin


@dataclass(frozen=True)
class RunData:
    """The corpora of a run and their weights."""

    corpora: list[tuple[Corpus, Fraction]]
    validation: list[tuple[Corpus, Fraction]] | None = None
    """Corpora whose validation splits are used; None: those of ``corpora``."""

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
        """For each validation window, the start of every document among its T inputs, int64; the first is 0."""
        sets = self._validation_sets(context_length, count)
        return [starts for s in sets for starts in s.document_starts()]

    def _validation_sets(self, context_length: int, count: int) -> list[ValidationSequences]:
        corpora = self.validation or self.corpora
        total = sum(weight for _, weight in corpora)
        return [
            ValidationSequences(corpus, context_length, max(1, round(count * weight / total)))
            for corpus, weight in corpora
        ]

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: a run resumes only on the same data."""
        identity: dict[str, Any] = {
            "tokenizer": self.corpora[0][0].meta["tokenizer"]["hash"],
            "data": _identity(self.corpora),
        }
        if self.validation is not None:  # left out otherwise: runs from before the option have no such entry
            identity["validation"] = _identity(self.validation)
        return identity


def _identity(corpora: list[tuple[Corpus, Fraction]]) -> list[list[str]]:
    total = sum(weight for _, weight in corpora)
    return [[corpus.meta["content_hash"], str(weight / total)] for corpus, weight in corpora]


def open_data(run: RunConfig, report: Callable[[object], None]) -> RunData:
    """Open the run's corpora; the built-in one is made first if needed (one process works, the others wait).

    Args:
        report: receives progress to print.

    Raises:
        UserError: a folder that is not a corpus, another tokenizer than the run's, weights that are not numbers.
    """
    data = _open_training(run, report)
    if run.validation.data is None:
        return data
    return dataclasses.replace(data, validation=_open_validation(run.validation.data, data.tokenizer))


def _open_validation(text: str, tokenizer: Tokenizer) -> list[tuple[Corpus, Fraction]]:
    """The corpora to validate on. UserError for one that was made with another tokenizer."""
    opened = []
    for folder, weight in parse_blend(text):
        try:
            corpus = Corpus.open(folder, tokenizer)
        except UserError as error:
            raise UserError(f"validation.data: {error}") from None
        if is_prefix(corpus.folder):  # Corpus.open holds out its end, since a pair has no split
            corpus = dataclasses.replace(corpus, validation=IndexedTokens(corpus.folder))
        elif not corpus.validation.num_tokens:
            corpus = dataclasses.replace(corpus, validation=corpus.training)
        opened.append((corpus, weight))
    return opened


def _open_training(run: RunConfig, report: Callable[[object], None]) -> RunData:
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
