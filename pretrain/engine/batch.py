"""Splits a global batch into data-parallel ranks, micro-batches and accumulation steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.config import ModelConfig
from model.context_plan import position_multiple
from model.errors import UserError, divisors
from model.parallel_plan import split_multiple

if TYPE_CHECKING:
    from pretrain.config.run_config import RunConfig


@dataclass(frozen=True)
class BatchPlan:
    """How the sequences of a step are divided: ``sequences = micro_batch * accumulation * data_parallel``."""

    sequences: int
    micro_batch: int
    accumulation: int
    data_parallel: int


def growing_multiple(model: ModelConfig, tensor_parallel: int, context_parallel: int) -> int:
    """What a micro-batch must be a multiple of for the ranks to share any number of heads."""
    length = model.context_length // context_parallel
    return tensor_parallel if length % (2 * tensor_parallel) else 1


def valid_micro_batches(
    per_rank: int, model: ModelConfig, tensor_parallel: int, context_parallel: int = 1, grows: bool = False
) -> list[int]:
    """List the micro-batches that divide *per_rank* sequences and that ranks which share heads can split; at
    every head count, of a run that *grows*."""
    multiple = split_multiple(model, tensor_parallel, context_parallel)
    if grows:
        multiple = math.lcm(multiple, growing_multiple(model, tensor_parallel, context_parallel))
    return [divisor for divisor in divisors(per_rank) if divisor % multiple == 0]


def share_batch(
    global_batch_tokens: int,
    micro_batch: int | None,
    context_length: int,
    data_parallel: int,
    context_parallel: int | None = None,
    ranks_per_copy: int = 1,
    sequence_parts: int = 1,
) -> tuple[int, int]:
    """Return the sequences per step, and those of one data-parallel rank.

    Args:
        context_parallel: ranks that share each sequence; None where none can.
        ranks_per_copy: tensor-parallel times context-parallel degree, for the message.
        sequence_parts: t with sequence parallelism, else 1.

    Raises:
        UserError: the tokens, the ranks or the micro-batch (unless None) do not divide; the message lists
            what would.
    """
    T = context_length
    per_copy = micro_batch or 1
    step = T * data_parallel * per_copy  # which both checks of the tokens admit, and the micro-batch
    lower = max(1, global_batch_tokens // step) * step
    if global_batch_tokens % T:
        raise UserError(
            f"global_batch_tokens: {global_batch_tokens} is not a multiple of the context length {T}; "
            f"nearest are {lower} and {lower + step}"
        )
    sequences = global_batch_tokens // T
    if sequences % data_parallel:
        offer = _offer_context_parallel(
            sequences, T, data_parallel, context_parallel, sequence_parts, per_copy
        )
        ranks = [ranks_per_copy * n for n in divisors(sequences) if sequences // n % per_copy == 0]
        valid = f"valid numbers of ranks are {ranks} (deepspeed --num_accelerators N), or " if ranks else ""
        raise UserError(
            f"global_batch_tokens: {sequences} sequences of {T} tokens cannot be shared evenly by "
            f"{data_parallel} data-parallel ranks; {valid}give --global_batch_tokens {lower} or "
            f"{lower + step}{offer}"
        )
    per_rank = sequences // data_parallel
    if micro_batch is not None and per_rank % micro_batch:
        raise UserError(
            f"micro_batch: {micro_batch} does not divide the {per_rank} sequences that each of "
            f"{data_parallel} ranks has per step; valid values are {divisors(per_rank)}"
        )
    return sequences, per_rank


def most_ranks(run: RunConfig, devices: int) -> int:
    """The largest number of ranks that can train *run* on so many devices, those of one sequence at least:
    tensor_parallel x context_parallel x a divisor of its batch.

    Raises:
        UserError: the batch is no whole number of sequences, or no number of ranks can share it.
    """
    model = run.build_model_config()
    sequences, _ = share_batch(run.global_batch_tokens, None, model.context_length, 1)
    found, degrees = [], (run.tensor_parallel, run.context_parallel)
    for copies in divisors(sequences):
        micro_batches = valid_micro_batches(sequences // copies, model, *degrees, grows=run.growth.active)
        if micro_batches if run.micro_batch is None else run.micro_batch in micro_batches:
            found.append(copies * math.prod(degrees))
    if not found:
        ranks = f"{run.tensor_parallel} tensor-parallel ranks"
        if run.micro_batch is None:
            problem = f"{run.global_batch_tokens} tokens are {sequences} sequences"
            raise UserError(f"global_batch_tokens: {problem}, which {ranks} cannot split; give more")
        problem = f"micro_batch: {run.micro_batch} does not divide the {sequences} sequences of a step"
        raise UserError(f"{problem}, or is none that {ranks} can split; leave it out")
    return max((ranks for ranks in found if ranks <= devices), default=math.prod(degrees))


def _offer_context_parallel(
    sequences: int,
    context_length: int,
    data_parallel: int,
    context_parallel: int | None,
    sequence_parts: int,
    per_copy: int,
) -> str:
    """The smallest context-parallel degree with which ranks can share fewer sequences than there are of them,
    to end a message with; empty if there is none."""
    if context_parallel is None or sequences >= data_parallel:
        return ""
    degrees = (
        context_parallel * more
        for more in divisors(data_parallel)
        if sequences % (data_parallel // more * per_copy) == 0
        and context_length % position_multiple(context_parallel * more, sequence_parts) == 0
    )
    degree = next(degrees, None)
    return "" if degree is None else f", or let ranks share each sequence: --context_parallel {degree}"
