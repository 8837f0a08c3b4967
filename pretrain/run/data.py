"""Opens a run's corpora, combines them by weight and identifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from model.errors import UserError
from pretrain.checkpoint.state import DataIdentity
from pretrain.config.run_config import RunConfig
from pretrain.data.blend import parse_blend
from pretrain.data.corpus import Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.making.make import prepare_builtin
from pretrain.data.megatron import is_prefix
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.extensions import extensions
from pretrain.runtime.world import World


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


def open_data(run: RunConfig, report: Callable[[object], None], world: World | None = None) -> RunData:
    """Open the run's corpora; the built-in one is made first if needed (one process works, the others wait).

    Args:
        report: receives progress to print.
        world: with it the call is collective.

    Raises:
        UserError: a folder that is not a corpus, another tokenizer than the run's, weights that are not
            numbers; on one rank, files that are not those of rank 0.
    """
    if world is None or world.size == 1:
        return _open_all(run, report)
    opened: list[RunData] = []

    def contents() -> list[str]:
        opened.append(_open_all(run, report))
        return opened[0].contents()

    expected = world.once(contents)
    data = opened[0] if world.is_main else _open_all(run, report)
    for (corpus, _), content in zip(data.all_corpora(), expected, strict=True):
        if corpus.meta.content_hash != content:
            raise UserError(
                f"data: {str(corpus.folder)!r} holds another corpus here (content "
                f"{corpus.meta.content_hash[:12]}) than on rank 0 (content {content[:12]}); valid: the same "
                "files on all nodes"
            )
    return data


def _open_all(run: RunConfig, report: Callable[[object], None]) -> RunData:
    data = _open_training(run, report)
    if run.validation.data is not None:
        validation = _open_validation(run.validation.data, data.tokenizer)
        data = dataclasses.replace(data, validation=validation)
    for extension in extensions():
        data = extension.data(run, data)
    return data


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


def _builtin(run: RunConfig, report: Callable[[object], None]) -> Path:
    """The built-in corpus of the run's kind."""
    for extension in extensions():
        if folder := extension.built_in_data(run, report):
            return folder
    return prepare_builtin(run.data_root, run.vocab_size, report)


def _open_training(run: RunConfig, report: Callable[[object], None]) -> RunData:
    if run.data == "builtin":
        if run.tokenizer is not None:
            raise UserError(
                "tokenizer: the built-in corpus has its own (--vocab_size N); for another: python -m "
                "pretrain.prepare "
                f"--dataset builtin --tokenizer {run.tokenizer} --out data/NAME, then --data data/NAME"
            )
        try:
            folder = _builtin(run, report)
        except OSError as error:
            raise UserError(
                f"data_root: the built-in corpus cannot be written to {run.data_root!r} "
                f"({error.strerror or error}); "
                "give another folder"
            ) from None
        return RunData([(Corpus.open(folder), Fraction(1))])
    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer is not None else None
    return RunData([(Corpus.open(folder, tokenizer), weight) for folder, weight in parse_blend(run.data)])
