"""How often each token occurs in a training split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain.data.corpus import Corpus

COUNTED_TOKENS = 1 << 28
"""Tokens that are counted at most: a second, where all of 100B would take minutes."""


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


def token_shares(corpus: Corpus, most: int = COUNTED_TOKENS) -> TokenShares:
    """Shares of the tokens in the training split.

    Args:
        most: of a longer split, chunks spread evenly over it are counted, about this many tokens.

    Raises:
        UserError: the split has ids that the tokenizer does not have.
    """
    counts = corpus.training.counts(corpus.tokenizer.vocab_size, most)
    smoothed = counts + 1
    return TokenShares(smoothed / smoothed.sum(), int(counts.sum()), corpus.training.num_tokens)
