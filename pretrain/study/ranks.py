"""How many ranks can share the batch of a run: a small batch cannot be shared by a whole node."""

from __future__ import annotations

from collections.abc import Sequence

from model.config import divisors
from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import share_batch, valid_micro_batches
from pretrain.study.study_file import PlannedRun


def rank_numbers(run: RunConfig) -> list[int]:
    """Every number of ranks that can train *run*, ascending: tensor_parallel x a divisor of its batch.

    Raises:
        UserError: the batch is no whole number of sequences, or no number of ranks can share it.
    """
    model = run.build_model_config()
    sequences, _ = share_batch(run.global_batch_tokens, None, model.context_length, 1)
    found = []
    for copies in divisors(sequences):
        micro_batches = valid_micro_batches(sequences // copies, model, run.tensor_parallel)
        if micro_batches if run.micro_batch is None else run.micro_batch in micro_batches:
            found.append(copies * run.tensor_parallel)
    if not found:
        raise UserError(
            f"micro_batch: {run.micro_batch} does not divide the {sequences} sequences of a step, or is none "
            f"that {run.tensor_parallel} tensor-parallel ranks can split; leave it out"
        )
    return found


def most_ranks(run: RunConfig, devices: int) -> int:
    """The largest number of ranks that can train *run* on so many devices; its tensor_parallel at least.

    Raises:
        UserError: see rank_numbers.
    """
    return max((ranks for ranks in rank_numbers(run) if ranks <= devices), default=run.tensor_parallel)


def by_most_ranks(runs: Sequence[PlannedRun], devices: int) -> dict[int, list[PlannedRun]]:
    """The runs by the number of ranks that each can use of so many devices, the largest number first."""
    found: dict[int, list[PlannedRun]] = {}
    for planned in runs:
        found.setdefault(most_ranks(planned.run, devices), []).append(planned)
    return dict(sorted(found.items(), reverse=True))
