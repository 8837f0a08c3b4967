"""Session: a run as one set of processes trains it, with everything that its parts are built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan
from pretrain.optim.groups import GroupRates
from pretrain.run.data import RunData, Sequences
from pretrain.run.decisions import Decisions
from pretrain.run.hooks import Hook
from pretrain.runtime.world import World

Batch = list[Tensor]
"""Inputs and labels of a micro-batch, int64 [B, T] each; with a document mask also where documents begin."""


@dataclass(kw_only=True)
class Session:
    """A run, and how these processes begin or continue it."""

    run: RunConfig
    """What was asked."""
    decisions: Decisions
    """What follows from it."""
    model: ModelConfig
    """The model as it is now; extensions may change it while the run trains."""
    world: World
    """The run's ranks, as seen by this one."""
    data: RunData
    """The opened corpora."""
    sequences: Sequences
    """The run's endless stream of training sequences."""
    rates: GroupRates
    """Learning rate of every optimizer group at every step."""
    store: CheckpointStore
    state: TrainingState
    """Where the run stands; the trainer moves it on."""
    resumed_from: Path | None = None
    """The checkpoint that the session goes on from."""
    optimizer_anew: bool = False
    """Whether only its weights are read: the optimizer is of another kind."""
    notes: list[str] = field(default_factory=list)
    """What the user should know before the first step, a line each."""
    hooks: list[Hook] = field(default_factory=list)
    """The hooks of the training loop, in the order in which they are called; empty in a run that is
    finished."""

    @property
    def batch(self) -> BatchPlan:
        """Sequences per step, and how they are spread. A micro-batch fits into memory, in evaluation as in
        training."""
        return self.decisions.batch.value

    @property
    def tokens_per_step(self) -> int:
        """Positions of all ranks in one optimizer step: label tokens, but for the padding of labelled
        examples."""
        return self.batch.sequences * self.model.context_length

    @property
    def finished(self) -> bool:
        """Whether the run has all its steps, and everything that was due at the last."""
        return self.state.step >= self.run.steps and not self.state.pending

    def hook(self, name: str) -> Any:
        """The session's hook of this name; None if it has none."""
        return next((hook for hook in self.hooks if hook.name == name), None)

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
        T = self.model.context_length  # as int32: half the bytes to send
        return self.world.once(lambda: self.data.validation_windows(T, count).astype(np.int32))

    def validation_bytes(self, count: int) -> int:
        """See RunData.validation_bytes; rank 0 counts them for all. Collective."""
        return self.world.once(lambda: self.data.validation_bytes(self.model.context_length, count))

    def validation_documents(self, count: int) -> list[np.ndarray]:
        """See RunData.validation_documents; rank 0 looks them up for all. Collective."""
        return self.world.once(lambda: self.data.validation_documents(self.model.context_length, count))
