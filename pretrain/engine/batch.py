"""How a global batch is cut into ranks, micro-batches and accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig, divisors
from model.parallel_plan import split_multiple


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per step and how they are spread: ``sequences = micro_batch * accumulation * data_parallel``."""

    sequences: int
    micro_batch: int
    accumulation: int
    data_parallel: int


def valid_micro_batches(per_rank: int, model: ModelConfig, tensor_parallel: int) -> list[int]:
    """The micro-batches that divide *per_rank* sequences and that the ranks which share heads can split."""
    multiple = split_multiple(model, tensor_parallel)
    return [divisor for divisor in divisors(per_rank) if divisor % multiple == 0]
