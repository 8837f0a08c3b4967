"""Computes the loss on a fixed set of held-out windows, shared among the ranks; and what needs no model
there: the unigram baseline, and zlib."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pretrain.data.corpus import Corpus
from pretrain.data.held_out import HeldOutBatches
from pretrain.data.sequences import pack_documents
from pretrain.run.data import RunData
from pretrain.runtime.world import World


@dataclass(frozen=True)
class ValidationResult:
    """Validation loss in nats per token, and bpb in bits per UTF-8 byte of the same text."""

    loss: float
    bpb: float


class Validation:
    """Computes the loss on the held-out windows of a run.

    Args:
        windows: token ids [count, T+1].
        label_bytes: UTF-8 bytes of all label tokens together.
        micro_batch: sequences per forward pass.
        document_starts: where documents begin among each window's inputs, for runs with a document mask: the
            loss then uses the attention that the model was trained with.
    """

    def __init__(
        self,
        windows: np.ndarray,
        label_bytes: int,
        micro_batch: int,
        world: World,
        document_starts: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.batches = HeldOutBatches(windows, micro_batch, world)
        self.label_bytes = label_bytes
        self.world = world
        self.document_starts = document_starts

    @torch.no_grad()
    def run(self, engine: Any) -> ValidationResult:
        """Return the mean loss over all windows. Collective; weights and training numbers do not change.

        Every rank makes the same number of forward passes; a rank that has run out of windows repeats the
        first one with weight zero.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # summed nats, label tokens
        engine.eval()
        for batch in self.batches:
            weight = int(batch.present.sum()) * self.batches.length
            inputs = [batch.inputs, batch.labels, *self._document_offsets(batch.rows.tolist())]
            loss = engine(*(tensor.to(self.world.device) for tensor in inputs))
            total[0] += loss.double() * weight
            total[1] += weight
        engine.train()
        nats, tokens = self.world.sum(total).tolist()
        return ValidationResult(loss=nats / tokens, bpb=nats / math.log(2) / self.label_bytes)

    def _document_offsets(self, rows: list[int]) -> list[torch.Tensor]:
        """The model's third input for these windows; nothing without a document mask."""
        if self.document_starts is None:
            return []
        starts = [self.document_starts[row] for row in rows]
        return [torch.from_numpy(pack_documents(starts, self.batches.length))]


@dataclass(frozen=True)
class Baselines:
    """Baselines in bits per UTF-8 byte, over the labels of a set of windows."""

    token_frequency: float
    """Every token guessed by its share among the training tokens."""
    zlib: float
    """``zlib -9`` over the windows' text, one after the other."""
    counted: int
    """Training tokens that the frequencies come from."""
    total: int
    """Training tokens of all corpora."""

    def __str__(self) -> str:
        text = f"unigram baseline {self.token_frequency:.4f}, zlib -9 {self.zlib:.4f}"
        if self.counted < self.total:
            text += f" (frequencies of {self.counted:,} of {self.total:,} training tokens, evenly spread)"
        return text


def compare_baselines(data: RunData, context_length: int, count: int) -> Baselines:
    """Compute the baselines of a run's validation windows: *count* windows of *context_length* labels.

    Reads the training split, or a part of it where it is long (token_shares); so call it on one rank, and let
    no other wait for it in a collective.
    """
    windows = data.validation_windows(context_length, count)
    label_bytes = data.validation_bytes(context_length, count)
    total = sum(weight for _, weight in data.corpora)
    found = [(token_shares(corpus), weight) for corpus, weight in data.corpora]
    shares = sum(float(weight / total) * corpus_shares.shares for corpus_shares, weight in found)
    labels = windows[:, 1:].astype(np.int64)
    nats = -np.log(shares)[labels].sum()
    text = b"".join(data.tokenizer.decode(row).encode() for row in labels.tolist())
    packed = len(zlib.compress(text, level=9))
    return Baselines(
        token_frequency=float(nats) / math.log(2) / label_bytes,
        zlib=8 * packed / label_bytes,
        counted=sum(corpus_shares.counted for corpus_shares, _ in found),
        total=sum(corpus_shares.total for corpus_shares, _ in found),
    )


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
