"""RunContext: the settings, data and ranks from which the parts of a run are built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from pretrain.config.run_config import RunConfig
from pretrain.data.labelled import held_out_examples
from pretrain.engine.batch import BatchPlan
from pretrain.optim.groups import GroupRates
from pretrain.run.data import RunData
from pretrain.runtime.world import World


@dataclass(kw_only=True)
class RunContext:
    """Settings and resources of a run, before its model is built."""

    run: RunConfig
    model: ModelConfig
    data: RunData
    """The opened corpora."""
    world: World
    """The run's ranks, as seen by this one."""
    batch: BatchPlan
    """Sequences per step, and how they are spread. A micro-batch fits into memory, in evaluation as in training."""
    rates: GroupRates
    """Learning rate of every optimizer group at every step."""
    bf16: bool
    """Whether the model computes in bf16; else in fp32."""

    def validation_windows(self, count: int) -> tuple[np.ndarray, int]:
        """See RunData.validation_windows; the token ids are int32 [n, T+1]. Rank 0 reads them for all. Collective.

        Raises:
            UserError: on every rank, when the held-out text is too short.
        """

        def read() -> tuple[np.ndarray, int]:
            windows, label_bytes = self.data.validation_windows(self.model.context_length, count)
            return windows.astype(np.int32), label_bytes  # half the bytes to send

        return self.world.once(read)

    def validation_documents(self, count: int) -> list[np.ndarray]:
        """See RunData.validation_documents; rank 0 looks them up for all. Collective."""
        return self.world.once(lambda: self.data.validation_documents(self.model.context_length, count))

    def held_out_examples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See pretrain.data.labelled.held_out_examples; rank 0 reads them for all. Collective."""
        corpus = self.data.corpora[0][0]
        return self.world.once(lambda: held_out_examples(corpus, self.model.context_length, count))

    @property
    def tokens_per_step(self) -> int:
        """Positions of all ranks in one optimizer step: label tokens, but for a classifier's padding."""
        return self.batch.sequences * self.model.context_length
