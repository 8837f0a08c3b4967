"""How a global batch is cut into ranks, micro-batches and accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import check_split, split_multiple

CPU_MICRO_BATCH_TOKENS = 4096  # a larger micro-batch gains nothing on a CPU and costs memory
MEMORY_SHARE = (
    0.6  # of what is left after weights and optimizer state; the rest is for fragmentation and buffers
)


@dataclass(frozen=True)
class BatchPlan:
    """Sequences per step and how they are spread: ``sequences = micro_batch * accumulation * data_parallel``."""

    sequences: int
    micro_batch: int
    accumulation: int
    data_parallel: int


def plan_batch(
    global_batch_tokens: int,
    micro_batch: int | None,
    model: ModelConfig,
    data_parallel: int,
    memory: int,
    device_type: str,
    tensor_parallel: int = 1,
) -> BatchPlan:
    """Derive the micro-batch (when None) and the accumulation steps from the global batch.

    Args:
        global_batch_tokens: tokens per optimizer step over all ranks.
        micro_batch: sequences per rank and forward pass, or None to choose the largest that fits.
        data_parallel: number of data-parallel ranks.
        memory: bytes of one rank's device (its total, so that the same machine always makes the same choice).
        tensor_parallel: ranks that share a copy of the model, and take part in each micro-batch of it.

    Raises:
        UserError: something does not divide, or the ranks that share heads cannot split the micro-batch; the message
            lists what would.
    """
    T = model.context_length
    if global_batch_tokens % T:
        lower = max(T, global_batch_tokens // T * T)
        raise UserError(
            f"global_batch_tokens: {global_batch_tokens} is no multiple of the context length {T}; "
            f"nearest are {lower} and {lower + T}"
        )
    sequences = global_batch_tokens // T
    if sequences % data_parallel:
        raise UserError(
            f"global_batch_tokens: {sequences} sequences of {T} tokens cannot be shared evenly by "
            f"{data_parallel} data-parallel ranks; valid numbers of ranks are {_divisors(sequences)}"
        )
    per_rank = sequences // data_parallel
    if micro_batch is None:
        micro_batch = _largest_micro_batch(per_rank, model, memory, device_type, tensor_parallel)
    if per_rank % micro_batch:
        raise UserError(
            f"micro_batch: {micro_batch} does not divide the {per_rank} sequences that each of "
            f"{data_parallel} ranks has per step; valid values are {_divisors(per_rank)}"
        )
    check_split(model, tensor_parallel, micro_batch)
    return BatchPlan(sequences, micro_batch, per_rank // micro_batch, data_parallel)


def activation_bytes(model: ModelConfig, tensor_parallel: int = 1) -> int:
    """Estimate of what one sequence keeps on a rank for its backward pass, in bytes, at 2 bytes an element.

    Per token and layer: the residual stream and both norms' inputs and outputs (6 d), q, k, v and the attention
    output (4 A_l), the FFN's hidden activations (4 widths gated, 2 plain); once, the logits in 2 and 4 bytes twice.
    All but the 6 d is shared among the tensor-parallel ranks.
    """
    hidden = (4 if model.ffn == "swiglu" else 2) * model.ffn_width
    layers = sum(
        6 * model.d_model + (4 * model.attention_width(layer) + hidden) // tensor_parallel
        for layer in range(model.num_layers)
    )
    logits = model.padded_vocab_size(tensor_parallel) // tensor_parallel
    return model.context_length * (2 * layers + 10 * logits)


def _largest_micro_batch(
    per_rank: int, model: ModelConfig, memory: int, device_type: str, tensor_parallel: int
) -> int:
    # bf16 weights and gradients, fp32 gradients, master and moments
    states = 18 * model.num_parameters(padded=True) // tensor_parallel
    room = max(0, memory - states) * MEMORY_SHARE
    limit = max(1, int(room // activation_bytes(model, tensor_parallel)))
    if device_type == "cpu":
        limit = min(limit, max(1, CPU_MICRO_BATCH_TOKENS // model.context_length))
    multiple = split_multiple(model, tensor_parallel)
    valid = [divisor for divisor in _divisors(per_rank) if divisor % multiple == 0]
    if not valid:
        return 1  # which plan_batch refuses, saying what would do
    return max((divisor for divisor in valid if divisor <= limit), default=valid[0])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def device_memory(device: torch.device, local_ranks: int = 1) -> int:
    """Total bytes of one rank's device; on a CPU, the machine's memory shared among its ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    return psutil.virtual_memory().total // max(1, local_ranks)
