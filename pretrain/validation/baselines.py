"""Baselines of the validation windows that need no model: guessing by token frequency, and zlib."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from pretrain.run.data import RunData
from pretrain.validation.token_counts import token_shares


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
        text = f"guessing by token frequency {self.token_frequency:.4f}, zlib -9 {self.zlib:.4f}"
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
