"""Opens a run's corpora."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.corpus import Corpus, is_prefix
from pretrain.data.indexed import IndexedTokens
from pretrain.data.sequences import parse_blend
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.prepare.builtin import prepare_builtin
from pretrain.run.data import RunData
from pretrain.runtime.world import World


def open_data(run: RunConfig, report: Callable[[object], None], world: World | None = None) -> RunData:
    """Open the run's corpora; the built-in one is made first if needed (one process works, the others wait).

    Args:
        report: receives progress to print.
        world: the ranks of a session; if given, the call is collective.

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

    expected = world.on_rank_zero(contents)
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
    if run.task == "classification":
        from pretrain.classification.examples import LabelledData

        data = LabelledData(data.corpora, data.validation)
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
    if run.task == "classification":  # snippets of Python's standard library, labelled by package
        from pretrain.classification.corpus import prepare_builtin_labelled

        return prepare_builtin_labelled(run.data_root, run.vocab_size, report)
    return prepare_builtin(run.data_root, run.vocab_size, report)


def _open_training(run: RunConfig, report: Callable[[object], None]) -> RunData:
    if run.data == "builtin":
        if run.tokenizer is not None:
            raise UserError(
                "tokenizer: the built-in corpus has its own (--vocab_size N); for another: "
                f"head-schedules prepare --dataset builtin --tokenizer {run.tokenizer} --out data/NAME, "
                "then --data data/NAME"
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
