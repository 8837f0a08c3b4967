"""Baselines of the validation windows that need no model: guessing by token frequency, and zlib."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from pretrain.data.corpus import token_shares
from pretrain.run.data import RunData


@dataclass(frozen=True)
class Baselines:
    """Baselines in bits per UTF-8 byte, over the labels of a set of windows."""

    token_frequency: float
    """Every token guessed by its share among the training tokens."""
    zlib: float
    """``zlib -9`` over the windows' text, one after the other."""

    def __str__(self) -> str:
        return f"guessing by token frequency {self.token_frequency:.4f}, zlib -9 {self.zlib:.4f}"


def compare_baselines(data: RunData, context_length: int, count: int) -> Baselines:
    """Compute the baselines of a run's validation windows: *count* windows of *context_length* labels.

    Reads the training split of every corpus once, or a part of it where it is long (token_shares).
    """
    windows, label_bytes = data.validation_windows(context_length, count)
    total = sum(weight for _, weight in data.corpora)
    shares = sum(float(weight / total) * token_shares(corpus) for corpus, weight in data.corpora)
    labels = windows[:, 1:].astype(np.int64)
    nats = -np.log(shares)[labels].sum()
    text = b"".join(data.tokenizer.decode(row).encode() for row in labels.tolist())
    packed = len(zlib.compress(text, level=9))
    return Baselines(float(nats) / math.log(2) / label_bytes, 8 * packed / label_bytes)
