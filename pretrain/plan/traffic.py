"""Computes the bytes that a rank sends in one optimizer step, as a ring algorithm sends them."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig
from pretrain.engine.ds_config import FP32_BYTES, EngineSettings
from pretrain.plan.context_parallel import plan_context_parallel
from pretrain.plan.footprint import rank_parameters
from pretrain.plan.memory import gathered_bytes, muon_elements, persistent_elements
from pretrain.plan.tensor_parallel import plan_tensor_parallel


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends per optimizer step."""

    gradients: int
    """Summing gradients over the data-parallel ranks."""
    parameters: int
    """Gathering updated (stage 3: all used) parameters from those ranks."""
    tensor_all_reduces: int
    """Tensor parallelism's all-reduces, which any head counts need."""
    head_exchange: int
    """What is added by heads that t does not divide."""
    host: int
    """Between device and host, with offloading: gradients down (and up, to add the next), weights up."""
    muon: int = 0
    """Among all ranks: pieces of matrices on their way to the owners, and of updates on their way back."""
    context: int = 0
    """Context parallelism's heads, keys and values."""

    @property
    def data_parallel(self) -> int:
        """All bytes between data-parallel ranks, which are those of all batches and positions."""
        return self.gradients + self.parameters

    @property
    def tensor_parallel(self) -> int:
        """All bytes between tensor-parallel ranks."""
        return self.tensor_all_reduces + self.head_exchange

    @property
    def total(self) -> int:
        """All bytes that are sent to other ranks."""
        return self.data_parallel + self.tensor_parallel + self.context + self.muon


def traffic(
    config: ModelConfig,
    settings: EngineSettings,
    data_parallel: int,
    micro_batch: int,
    accumulation: int,
    tensor_parallel: int = 1,
) -> Traffic:
    """Count the bytes that a rank sends in a step.

    With n = P (N-1)/N elements of a rank's P parameters (an all-gather or a reduce-scatter sends n, an
    all-reduce 2 n):

    - stage 1: gradients once a step, 2 n (DeepSpeed all-reduces buckets, and keeps its part); weights, n;
    - stage 2: the same, but gradients once a micro-batch, since a rank keeps the sums of its part only;
    - stage 3: gradients n a micro-batch; weights n for each forward pass, and for each backward pass those
      that were released in between; parameters below the persistence threshold once a step.

    Gradients travel in the ds_config's communication_data_type, weights in the compute precision.
    Tensor-parallel bytes are pretrain.plan.tensor_parallel's; activation checkpointing repeats their forward
    half.

    Each data-parallel rank stands for settings.context_parallel ranks, over which gradients are also summed.

    Raises:
        UserError: t does not divide the model, or the micro-batch cannot be split.
    """
    c = settings.context_parallel
    data_parallel *= c
    parameters = rank_parameters(config, tensor_parallel)
    total = sum(p.elements for p in parameters)

    def count_sent(number: int) -> int:
        return number * (data_parallel - 1) // data_parallel

    s, communication = settings.compute_bytes, settings.communication_bytes
    share = -(-total // data_parallel)
    uploaded = s * share
    if settings.stage == 3:
        persistent = persistent_elements(parameters, settings)
        partitioned = s * (total - persistent)
        regathered = max(0, partitioned - gathered_bytes(parameters, settings))
        gradients = accumulation * count_sent(communication * total)
        used = accumulation * (partitioned + regathered) + s * persistent
        weights = count_sent(used)
        if settings.offload_parameters:  # each part is uploaded before it is gathered
            uploaded = used // data_parallel
    else:
        times = accumulation if settings.stage == 2 else 1
        both_ways = 2 if settings.all_reduce_buckets or settings.whole_gradients else 1
        gradients = times * both_ways * count_sent(communication * total)
        weights = count_sent(s * total)

    dtype = "bf16" if settings.bf16 else "fp32"
    tensor_traffic = plan_tensor_parallel(config, tensor_parallel, micro_batch, dtype, c)
    context = plan_context_parallel(
        config, c, tensor_parallel, micro_batch, dtype, checkpointing=settings.checkpointing
    )
    passes = 3 if settings.checkpointing else 2  # each sends half of the plan's bytes
    layers = sum(layer.all_reduce_bytes for layer in tensor_traffic.layers) * passes // 2
    exchange = tensor_traffic.exchange_bytes * passes // 2
    host = uploaded if settings.offload_optimizer or settings.offload_parameters else 0
    if settings.offload_optimizer:
        host += (FP32_BYTES + _accumulation_bytes(settings, accumulation)) * share
    ranks = data_parallel * tensor_parallel
    pieces = FP32_BYTES * -(-muon_elements(parameters, settings) // data_parallel)
    return Traffic(
        gradients=gradients,
        parameters=weights,
        tensor_all_reduces=accumulation * (layers + tensor_traffic.outside_bytes),
        head_exchange=accumulation * exchange,
        host=host,
        context=accumulation * context.sent_bytes,
        muon=2 * pieces * (ranks - 1) // ranks,
    )


def _accumulation_bytes(settings: EngineSettings, accumulation: int) -> int:
    """Bytes that travel between host and device to accumulate a gradient element, see
    async_accumulate_grad_in_cpu_via_gpu in deepspeed/runtime/zero/stage_1_and_2.py and partition_grads in
    stage3.py, which reads back also what it wrote first."""
    if settings.stage == 3:
        return 2 * accumulation * settings.accumulation_bytes
    return (2 * accumulation - 1) * settings.compute_bytes if accumulation > 1 else 0
