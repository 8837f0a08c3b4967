"""How much memory a rank of a run needs, by arithmetic: states by ZeRO stage, buffers, and the peak of a step.

The formulas follow what torch's autograd keeps for this model's operations (pretrain/footprint.py) and what DeepSpeed
0.19.8 allocates (its files are named below); docs/memory.md derives them and compares them with real sessions. s is the
size of a compute element in bytes (bf16 2, fp32 4), P the parameters that a tensor rank's part of the model has, N the
data-parallel ranks. Nothing is allocated here and no process group is needed: the numbers are for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.config import ModelConfig
from pretrain.footprint import (
    FP32_BYTES,
    Activations,
    DeviceType,
    EngineSettings,
    Parameter,
    activations,
    rank_parameters,
)

MOMENTS = 2  # of AdamW
# Above this many gradient elements BF16_Optimizer's groups are all-reduced one by one, without being copied into one
# (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
ENGINE_BUCKET = 500_000_000


# ---------------------------------------------------------------------- states


@dataclass(frozen=True)
class States:
    """Bytes that stay on one rank from step to step, on its device and in the host's memory."""

    parameters: int
    """Weights in the compute precision: all of the rank's at stages 1 and 2, 1/N of them at stage 3."""
    master: int
    """fp32 weights of the rank's 1/N, which the optimizer steps; in fp32 runs too."""
    moments: int
    """AdamW's two fp32 moments of the rank's 1/N."""
    gradients: int
    """Gradient buffers that are never freed."""
    host: int
    """What is offloaded, in the host's memory; it is not in the other figures."""

    @property
    def device(self) -> int:
        """All of them on the device."""
        return self.parameters + self.master + self.moments + self.gradients


def states(parameters: list[Parameter], settings: EngineSettings, data_parallel: int) -> States:
    """Weights, optimizer state and lasting gradient buffers by ZeRO stage (arXiv 1910.02054).

    Partitions are rounded up; DeepSpeed's padding to a multiple of 2 N elements a group is left out.
    """
    everything = sum(parameter.elements for parameter in parameters)
    share = -(-everything // data_parallel)
    s = settings.compute_bytes
    weights = s * everything
    if settings.stage == 3:
        weights = s * (share + _persistent(parameters, settings))
    master = FP32_BYTES * share
    moments = MOMENTS * FP32_BYTES * share
    gradients = 0
    if settings.stage == 3:
        gradients = settings.accumulation_bytes * share
    elif settings.whole_gradients:
        gradients = FP32_BYTES * everything
    host = 0
    if settings.offload_optimizer:
        # fp32 gradients for the optimizer; at stages 1, 2 the new weights on their way back, at stage 3 the
        # accumulated gradients.
        host = master + moments + FP32_BYTES * share + (gradients if settings.stage == 3 else s * share)
        master = moments = gradients = 0
    if settings.offload_parameters:
        host += s * share
        weights -= s * share
    return States(weights, master, moments, gradients, host)


def _persistent(parameters: list[Parameter], settings: EngineSettings) -> int:
    return sum(p.elements for p in parameters if p.elements <= settings.persistence_threshold)


# ---------------------------------------------------------------------- peak


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of one rank, in bytes."""

    states: States
    activations: Activations
    buffers: int
    """Reduction buckets and the copies that a reduction makes of one."""
    gathered: int
    """Stage 3: parameters that are whole on the rank at the end of the forward pass."""
    transient_gradients: int
    """Gradients that exist from the backward pass to the step."""
    phases: dict[str, int] = field(default_factory=dict)
    """The most that is allocated on the device in each part of a step."""

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Which phase that is."""
        return max(self.phases, key=lambda phase: self.phases[phase])


def memory_plan(
    config: ModelConfig,
    settings: EngineSettings,
    data_parallel: int,
    micro_batch: int,
    accumulation: int = 1,
    tensor_parallel: int = 1,
    device: DeviceType = "cuda",
) -> MemoryPlan:
    """Predict what one rank allocates, as the largest of four moments of a steady step.

    - loss: every activation, the logits and their gradient;
    - layers: from the last layer to the first, its activations and those before it, and the gradients made so far;
    - reduction: all gradients, no activations;
    - step: gradients, flattened for the optimizer.
    """
    parameters = rank_parameters(config, tensor_parallel)
    kept = states(parameters, settings, data_parallel)
    acts = activations(config, micro_batch, settings, tensor_parallel, device)
    total = sum(p.elements for p in parameters)
    s = settings.compute_bytes

    before, during, flattened = _gradients(parameters, settings, data_parallel, accumulation)
    buffers = _buffers(parameters, settings, data_parallel)
    lasting = buffers.bucket if settings.stage == 3 else 0
    gathered = _gathered(parameters, settings)
    embedding = parameters[0].elements * s
    tied = (
        embedding if config.tie_embeddings else 0
    )  # the head's gradient waits for the embedding's to be added
    base = kept.device + before

    forward = base + lasting + gathered + acts.total
    phases = {"loss": forward + max(acts.logits + acts.loss_chunks, embedding)}

    hidden = 3 * micro_batch * config.context_length * config.d_model * s
    by_layer = layer_elements(config, parameters)
    made = 0 if tied else parameters[-1].elements  # gradients so far
    layers, whole = 0, gathered
    for layer in reversed(range(config.num_layers)):
        below = base + buffers.bucket + whole + acts.outside + tied + sum(acts.kept[:layer])
        inside = (
            acts.kept[layer] + (acts.per_layer[layer] if settings.checkpointing else 0) + acts.working[layer]
        )
        # No bucket has been reduced into the rank's partition while all that was made still fits into one.
        inside += during if made + max(by_layer[layer]) > settings.reduce_bucket else 0
        piled = s * made if settings.whole_gradients and accumulation == 1 else 0
        layers = max(layers, below + inside + piled)
        made += sum(by_layer[layer])
        at_end = (
            hidden + during + s * max(by_layer[layer]) + (0 if settings.whole_gradients else buffers.copies)
        )
        layers = max(layers, below + piled + at_end)
        whole = max(0, whole - s * sum(by_layer[layer]))
    phases["layers"] = layers

    # At the end the embedding's gradient, with tied embeddings beside the head's, to which it is added.
    last = tied + embedding
    piled = s * total if settings.whole_gradients and accumulation == 1 else 0
    phases["reduction"] = (
        base + during + buffers.bucket + max(last + piled, buffers.copies + embedding + piled)
    )
    phases["step"] = kept.device + flattened + lasting
    reported = buffers.bucket + buffers.copies
    return MemoryPlan(kept, acts, reported, gathered, max(before + during, flattened), phases)


def _gathered(parameters: list[Parameter], settings: EngineSettings) -> int:
    """Stage 3: bytes of parameters that are whole at the end of the forward pass.

    A parameter stays after its use if it is used again within the reuse distance. From a layer's forward pass to its
    backward pass, everything above it goes by twice, so the upper half of that distance stays; below that, what is
    prefetched does, and the largest parameter that is in use.
    """
    if settings.stage < 3:
        return 0
    rest = sum(p.elements for p in parameters) - _persistent(parameters, settings)
    largest = max(p.elements for p in parameters)
    return settings.compute_bytes * min(
        rest, settings.reuse_distance // 2 + settings.prefetch_bucket + largest
    )


def layer_elements(config: ModelConfig, parameters: list[Parameter]) -> list[list[int]]:
    """Elements of each layer's parameters."""
    sizes: list[list[int]] = [[] for _ in range(config.num_layers)]
    for parameter in parameters:
        if parameter.name.startswith("layers."):
            sizes[int(parameter.name.split(".")[1])].append(parameter.elements)
    return sizes


def _gradients(
    parameters: list[Parameter], settings: EngineSettings, data_parallel: int, accumulation: int
) -> tuple[int, int, int]:
    """Gradient bytes beyond the lasting buffers.

    Returns:
        Those of earlier micro-batches, alive all through the last one; those that its backward pass adds; and those
        alive in the optimizer's step.
    """
    total = sum(p.elements for p in parameters)
    share = -(-total // data_parallel)
    s, decayed = settings.compute_bytes, sum(p.elements for p in parameters if p.decayed)
    group = -(-max(decayed, total - decayed) // data_parallel)
    if (
        settings.stage == 3
    ):  # the accumulated partition lasts; a group at a time is flattened for the optimizer
        return 0, 0, 0 if settings.offload_optimizer else FP32_BYTES * group
    if settings.whole_gradients:
        # What backward leaves in .grad is set to zero, not freed, until the step is over.
        return (s * total if accumulation > 1 else 0), 0, s * total
    partition = settings.accumulation_bytes * share
    if settings.separate_accumulation:  # one flat fp32 buffer, which is also what the optimizer reads
        return (partition if accumulation > 1 else 0), (partition if accumulation == 1 else 0), partition
    if settings.offload_optimizer:  # accumulated on the host
        return 0, s * max(p.elements for p in parameters), 0
    if settings.stage == 1 and accumulation > 1:  # whole until the last micro-batch
        return s * total, partition, partition + FP32_BYTES * group
    return (partition if accumulation > 1 else 0), partition, partition + FP32_BYTES * group


@dataclass(frozen=True)
class Buffers:
    """Bytes that reducing gradients takes."""

    bucket: int
    """Reserved whole, from the first gradient to the end of the backward pass; at stage 3 for good."""
    copies: int
    """Of what is reduced at a time: as much as fits a bucket, or one parameter that is larger."""


def _buffers(parameters: list[Parameter], settings: EngineSettings, data_parallel: int) -> Buffers:
    total = sum(p.elements for p in parameters)
    largest = max(p.elements for p in parameters)
    s = settings.compute_bytes
    if (
        settings.whole_gradients
    ):  # reduced by the engine, groups side by side in one copy unless they are large
        decayed = sum(p.elements for p in parameters if p.decayed)
        copied = total if data_parallel > 1 and decayed <= ENGINE_BUCKET else 0
        return Buffers(0, FP32_BYTES * max(copied, largest))
    reduced = min(total, max(largest, settings.reduce_bucket))
    if settings.stage == 3:
        copies = settings.communication_bytes * reduced if data_parallel > 1 else 0
        return Buffers(settings.communication_bytes * settings.reduce_bucket, copies)
    copies = 0
    if settings.separate_accumulation:  # flattened as it is, then widened for the reduction
        copies = (s + settings.communication_bytes) * reduced
    elif data_parallel > 1:
        copies = s * reduced
    return Buffers(s * settings.reduce_bucket * (2 if settings.overlap else 1), copies)
