"""Opens a run's corpora, combines them by weight and identifies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.blend import parse_blend
from pretrain.data.corpus import Checked, Corpus
from pretrain.data.indexed import IndexedTokens
from pretrain.data.labelled import LabelledSequences, classes_of
from pretrain.data.making.builtin import prepare_builtin
from pretrain.data.making.labelled import prepare_builtin_labelled
from pretrain.data.megatron import is_prefix
from pretrain.data.meta import META_FILE
from pretrain.data.sequences import TrainingSequences, ValidationSequences
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.runtime.world import World

Known = dict[str, Checked]
"""What rank 0 has checked, by folder."""


@dataclass(frozen=True)
class RunData:
    """The corpora of a run and their weights."""

    corpora: list[tuple[Corpus, Fraction]]
    validation: list[tuple[Corpus, Fraction]] | None = None
    """Corpora whose validation splits are used; None: those of ``corpora``."""
    labelled: bool = False
    """Whether the documents are examples of classes, for a classifier."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all corpora share."""
        return self.corpora[0][0].tokenizer

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes; None for language. UserError if the corpus has no labels."""
        return classes_of(self.corpora[0][0]) if self.labelled else None

    def training_sequences(self, context_length: int, seed: int) -> TrainingSequences | LabelledSequences:
        """The run's endless stream of sequences."""
        if self.labelled:
            return LabelledSequences(self.corpora, context_length, seed)
        return TrainingSequences(self.corpora, context_length, seed)

    def validation_windows(self, context_length: int, count: int) -> tuple[np.ndarray, int]:
        """Held-out windows, shared among the corpora by weight.

        Returns:
            Token ids [n, T+1] and the UTF-8 bytes of all labels; 0 bytes of a labelled corpus, whose examples stand one
            after the other in the windows.
        """
        sets = self._validation_sets(context_length, count)
        label_bytes = 0 if self.labelled else sum(s.label_bytes() for s in sets)
        return np.concatenate([s.batch(0, len(s)) for s in sets]), label_bytes

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

    def all_corpora(self) -> list[tuple[Corpus, Fraction]]:
        """Those that are trained on, and those that are only validated on."""
        return [*self.corpora, *(self.validation or [])]

    def known(self) -> Known:
        """What was checked when the corpora were opened, for the other ranks."""
        return {str(corpus.folder): corpus.checked() for corpus, _ in self.all_corpora()}

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data: a run resumes only on the same data."""
        identity: dict[str, Any] = {
            "tokenizer": self.corpora[0][0].meta.tokenizer.hash,
            "data": _identity(self.corpora),
        }
        if self.validation is not None:  # left out otherwise: runs from before the option have no such entry
            identity["validation"] = _identity(self.validation)
        return identity


def _identity(corpora: list[tuple[Corpus, Fraction]]) -> list[list[str]]:
    total = sum(weight for _, weight in corpora)
    return [[corpus.meta.content_hash, str(weight / total)] for corpus, weight in corpora]


def open_data(run: RunConfig, report: Callable[[object], None], world: World | None = None) -> RunData:
    """Open the run's corpora; the built-in one is made first if needed (one process works, the others wait).

    Args:
        report: receives progress to print.
        world: with it the call is collective. Rank 0 checks the corpora; ranks that see the same files take its word.

    Raises:
        UserError: a folder that is not a corpus, another tokenizer than the run's, weights that are not numbers; on one
            rank, files that are not those of rank 0.
    """
    if world is None or world.size == 1:
        return _open_all(run, report, {})
    opened: list[RunData] = []

    def check() -> Known:
        opened.append(_open_all(run, report, {}))
        return opened[0].known()

    known = world.once(check)
    if world.is_main:
        return opened[0]
    data = _open_all(run, report, known)
    for corpus, _ in data.all_corpora():
        expected = known[str(corpus.folder)].meta.content_hash
        if corpus.meta.content_hash != expected:
            raise UserError(
                f"data: {str(corpus.folder)!r} holds another corpus here (content {corpus.meta.content_hash[:12]}) "
                f"than on rank 0 (content {expected[:12]}); valid: the same files on all nodes"
            )
    return data


def _open_all(run: RunConfig, report: Callable[[object], None], known: Known) -> RunData:
    data = _open_training(run, report, known)
    if run.validation.data is None:
        return data
    return dataclasses.replace(data, validation=_open_validation(run.validation.data, data.tokenizer, known))


def _open_validation(text: str, tokenizer: Tokenizer, known: Known) -> list[tuple[Corpus, Fraction]]:
    """The corpora to validate on. UserError for one that was made with another tokenizer."""
    opened = []
    for folder, weight in parse_blend(text):
        checked = known.get(str(Path(folder)))
        try:
            corpus = Corpus.open(folder, tokenizer, checked)
        except UserError as error:
            raise UserError(f"validation.data: {error}") from None
        if is_prefix(corpus.folder):  # Corpus.open holds out its end, since a pair has no split
            # It has just been checked: by Corpus.open, or by another rank.
            corpus = dataclasses.replace(corpus, validation=IndexedTokens(corpus.folder, check=False))
        elif not corpus.validation.num_tokens:
            corpus = dataclasses.replace(corpus, validation=corpus.training)
        opened.append((corpus, weight))
    return opened


def _builtin(run: RunConfig, report: Callable[[object], None]) -> Path:
    """The built-in corpus of the run's task."""
    if run.task == "classification":
        return prepare_builtin_labelled(run.data_root, run.vocab_size, report)
    return prepare_builtin(run.data_root, run.vocab_size, report)


def _open_training(run: RunConfig, report: Callable[[object], None], known: Known) -> RunData:
    labelled = run.task == "classification"
    if run.data == "builtin":
        if run.tokenizer is not None:
            raise UserError(
                "tokenizer: the built-in corpus has its own (--vocab_size N); for another: python -m pretrain.prepare "
                f"--dataset builtin --tokenizer {run.tokenizer} --out data/NAME, then --data data/NAME"
            )
        try:
            # Its name is the hash of some thousand files, which rank 0 has read.
            known_folder = Path(next(iter(known), ""))
            known_here = known and (known_folder / META_FILE).is_file()
            folder = known_folder if known_here else _builtin(run, report)
        except OSError as error:
            raise UserError(
                f"data_root: the built-in corpus cannot be written to {run.data_root!r} ({error.strerror or error}); "
                "give another folder"
            ) from None
        return RunData(
            [(Corpus.open(folder, checked=known.get(str(folder))), Fraction(1))], labelled=labelled
        )
    tokenizer = load_tokenizer(run.tokenizer) if run.tokenizer is not None else None
    return RunData(
        [
            (Corpus.open(folder, tokenizer, known.get(str(Path(folder)))), weight)
            for folder, weight in parse_blend(run.data)
        ],
        labelled=labelled,
    )
