"""Session: a run as one set of processes trains it, with everything that its parts are built from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan
from pretrain.optim.groups import GroupRates
from pretrain.run.data import RunData, Sequences
from pretrain.run.decisions import Decisions
from pretrain.runtime.world import World

Batch = list[Tensor]
"""Inputs and labels of a micro-batch, int64 [B, T] each; with a document mask also where documents begin."""


@dataclass(kw_only=True)
class Session:
    """A run, and what these processes have opened and decided to begin or continue it. Hooks are given it."""

    run: RunConfig
    """The requested settings."""
    world: World
    """The run's ranks, as seen by this one."""
    data: RunData
    """The opened corpora."""
    sequences: Sequences
    """The run's endless stream of training sequences."""
    decisions: Decisions
    """The decisions derived from them."""
    model_config: ModelConfig
    """The model as it is now; growth changes it while the run trains."""
    rates: GroupRates
    """Learning rate of every optimizer group at every step."""
    state: TrainingState
    """The run's progress, which the trainer updates."""

    @property
    def batch(self) -> BatchPlan:
        """Sequences per step, and how they are spread. A micro-batch fits into memory, in evaluation as in
        training."""
        return self.decisions.batch.value

    @property
    def tokens_per_step(self) -> int:
        """Positions of all ranks in one optimizer step, the padding of labelled examples included."""
        return self.batch.sequences * self.model_config.context_length

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps, and everything that was due at the last."""
        return self.state.step >= self.run.steps and not self.state.pending

    def micro_batch(self, seen: int, index: int) -> Batch:
        """This rank's *index*-th micro-batch after *seen* sequences of the run, as Transformer.forward takes
        it.

        A function of the number of sequences, so neither ranks nor restarts change the order.
        """
        B = self.batch.micro_batch
        first = seen + (index * self.batch.data_parallel + self.world.data_rank) * B
        parts = [*self.sequences.inputs_and_labels(first, B)]
        if self.run.document_mask:
            parts.append(self.sequences.document_offsets(first, B))
        batch = [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
        return [tensor.pin_memory() for tensor in batch] if self.world.device.type == "cuda" else batch

    def validation_windows(self, count: int) -> np.ndarray:
        """See RunData.validation_windows; token ids int32 [n, T+1]. Rank 0 reads them for all. Collective.

        Raises:
            UserError: on every rank, when the held-out text is too short.
        """
        T = self.model_config.context_length  # as int32: half the bytes to send
        return self.world.on_rank_zero(lambda: self.data.validation_windows(T, count).astype(np.int32))

    def validation_bytes(self, count: int) -> int:
        """See RunData.validation_bytes; rank 0 counts them for all. Collective."""
        return self.world.on_rank_zero(
            lambda: self.data.validation_bytes(self.model_config.context_length, count)
        )

    def validation_documents(self, count: int) -> list[np.ndarray]:
        """See RunData.validation_documents; rank 0 looks them up for all. Collective."""
        T = self.model_config.context_length
        return self.world.on_rank_zero(lambda: self.data.validation_documents(T, count))
