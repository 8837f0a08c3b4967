"""RunContext: the settings, data and ranks from which the parts of a run are built."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig
from pretrain.config.run_config import RunConfig
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

    @property
    def tokens_per_step(self) -> int:
        """Label tokens of all ranks in one optimizer step."""
        return self.batch.sequences * self.model.context_length
