"""How often each token occurs in a training split: stored when a corpus is prepared, else counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.data.corpus import Corpus
from pretrain.data.making.progress import Every

COUNTS_FILE = "training_counts.npy"
COUNTED_TOKENS = 1 << 30
"""Tokens that are counted at most where no counts are stored: a few seconds, where 100B would take
minutes."""
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class TokenShares:
    """Share of each token among the training tokens of a corpus."""

    shares: np.ndarray
    """float64 [V], with one added to every count: a token that never occurs in training has a share, too, and
    predicting by these shares has a finite loss."""
    counted: int
    """Tokens that were counted."""
    total: int
    """Tokens of the training split."""


def write_counts(folder: Path, counts: np.ndarray) -> Path:
    """Write the counts of *folder*'s training split, int64 [V]; returns the file."""
    path = folder / COUNTS_FILE
    with path.open("wb") as stream:
        np.save(stream, counts.astype("<i8"), allow_pickle=False)
    return path


def stored_counts(corpus: Corpus) -> np.ndarray | None:
    """The counts that *corpus* was prepared with, int64 [V].

    None where there are none (a bare pair), and where the file cannot be those of this corpus; ``prepare
    verify`` says what is wrong with it.
    """
    try:
        counts = np.load(corpus.folder / COUNTS_FILE, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = counts.dtype == np.int64 and counts.shape == (corpus.tokenizer.vocab_size,)
    return counts if fits and int(counts.sum()) == corpus.training.num_tokens else None


def token_shares(
    corpus: Corpus, most: int = COUNTED_TOKENS, report: Callable[[object], object] | None = None
) -> TokenShares:
    """Shares of the tokens in the training split: from the stored counts, else by reading it.

    Args:
        most: of a longer split without stored counts, chunks spread evenly over it are counted, about this
            many tokens.
        report: receives a line every ten seconds of counting.

    Raises:
        UserError: the split has ids that the tokenizer does not have.
    """
    counts = stored_counts(corpus)
    if counts is None:
        total, due = corpus.training.num_tokens, Every(PROGRESS_SECONDS)
        # IndexedTokens.counts takes every n-th chunk.
        expected = max(1.0, total / max(1, -(-total // most)))

        def progress(counted: int) -> None:
            if report and due():
                share = min(1.0, counted / expected)
                report(f"counting {corpus.name}: {counted:,} tokens ({share:.0%}); it has no stored counts")

        counts = corpus.training.counts(corpus.tokenizer.vocab_size, most, progress=progress)
    smoothed = counts + 1
    return TokenShares(smoothed / smoothed.sum(), int(counts.sum()), corpus.training.num_tokens)
