"""Fixed windows in batches that are shared among the ranks, so that every rank makes as many forward passes."""

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
    """What one rank reads in one forward pass, on the CPU."""

    rows: Tensor
    """Which windows, int64 [B]; 0 where there is none left."""
    present: Tensor
    """Which of the rows count, bool [B]."""
    inputs: Tensor
    """Token ids int64 [B, T]."""
    labels: Tensor
    """int64 [B, T]. Rows that do not count carry ignored labels; in a batch without any that counts they do not, so
    that its loss is finite, and the reader must give it no weight."""


class HeldOutBatches:
    """The batches of this rank.

    The ranks of a tensor group have the same ones. A rank that has run out of windows repeats the first: a forward pass
    may be collective (ZeRO-3 gathers weights in it), and none may make one more or less.

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
        """Windows, n."""
        return len(self.windows)

    @property
    def length(self) -> int:
        """Labels of a window, T."""
        return self.windows.shape[1] - 1

    def __len__(self) -> int:
        """Forward passes of every rank."""
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
