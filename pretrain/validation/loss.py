"""Computes the loss on a fixed set of held-out windows, shared among the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pretrain.data.held_out import HeldOutBatches
from pretrain.data.sequences import pack_documents
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
