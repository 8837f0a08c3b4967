"""Splits fixed windows into batches for the ranks, so that all ranks make the same number of
forward passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.loss import IGNORED_LABEL
from pretrain.runtime.world import World


@dataclass(frozen=True)
class HeldOutBatch:
    """The input of one forward pass on one rank, on the CPU."""

    rows: Tensor
    """Each row's window, int64 [B]; 0 where none is left."""
    present: Tensor
    """Which of the rows count, bool [B]."""
    inputs: Tensor
    """Token ids int64 [B, T]."""
    labels: Tensor
    """int64 [B, T]. Rows that do not count have ignored labels. If no row of a batch counts they keep their
    labels, so that its loss is finite; the caller must give that batch no weight."""


class HeldOutBatches:
    """Iterates over the batches of this rank.

    The ranks of a tensor group have the same batches. A rank that has run out of windows repeats the first: a
    forward pass may be collective (ZeRO-3 gathers weights in it), so all ranks must make the same number.

    Args:
        windows: token ids [n, T+1].
        micro_batch: B, sequences per forward pass.
        world: the ranks that share the work.
    """

    def __init__(self, windows: np.ndarray, micro_batch: int, world: World) -> None:
        self.windows = torch.from_numpy(windows.astype(np.int64))
        self.micro_batch, self.world = micro_batch, world

    @property
    def count(self) -> int:
        """Number of windows, n."""
        return len(self.windows)

    @property
    def length(self) -> int:
        """Number of labels per window, T."""
        return self.windows.shape[1] - 1

    def __len__(self) -> int:
        """Number of forward passes per rank."""
        return math.ceil(self.count / (self.micro_batch * self.world.data_parallel))

    def __iter__(self) -> Iterator[HeldOutBatch]:
        for index in range(len(self)):
            first = (index * self.world.data_parallel + self.world.data_rank) * self.micro_batch
            rows = torch.arange(first, first + self.micro_batch)
            present = rows < self.count
            rows = torch.where(present, rows, 0)
            batch = self.windows[rows]
            labels = batch[:, 1:].clone()
            if present.any():
                labels[~present] = IGNORED_LABEL
            yield HeldOutBatch(rows, present, batch[:, :-1].contiguous(), labels)
