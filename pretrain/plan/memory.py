"""Predicts a rank's memory by arithmetic: states by ZeRO stage, buffers, and the peak of a step.

The formulas follow what torch's autograd keeps for this model's operations (see footprint.py) and what
DeepSpeed 0.19.8 allocates (its files are named below); docs/memory.md derives them and compares them with
real sessions. s is the size of a compute element in bytes (bf16 2, fp32 4), P the parameters that a tensor
rank's part of the model has, N the data-parallel ranks. Nothing is allocated here and no process group is
needed: the numbers are for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.config import ModelConfig
from pretrain.engine.ds_config import FP32_BYTES, EngineSettings
from pretrain.plan.footprint import Activations, DeviceType, Parameter, activations, rank_parameters

MOMENTS = 2  # of AdamW
# Above this many gradient elements BF16_Optimizer's groups are all-reduced one by one, without being copied
# into one (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
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
    """fp32 moments of the rank's 1/N: AdamW's two, and the momentum of what Muon steps."""
    gradients: int
    """Gradient buffers that are never freed."""
    host: int
    """What is offloaded to the host's memory; the other fields do not include it."""

    @property
    def device(self) -> int:
        """Bytes of all states on the device."""
        return self.parameters + self.master + self.moments + self.gradients


def states(
    parameters: tuple[Parameter, ...], settings: EngineSettings, data_parallel: int, accumulation: int = 1
) -> States:
    """Weights, optimizer state and lasting gradient buffers by ZeRO stage (arXiv 1910.02054).

    Partitions are rounded up; DeepSpeed's padding to a multiple of 2 N elements a group is left out.
    """
    everything = sum(parameter.elements for parameter in parameters)
    share = -(-everything // data_parallel)
    s = settings.compute_bytes
    weights = s * everything
    if settings.stage == 3:
        weights = s * (share + persistent_elements(parameters, settings))
    master = FP32_BYTES * share
    moments = MOMENTS * FP32_BYTES * share - FP32_BYTES * (
        muon_elements(parameters, settings) // data_parallel
    )
    gradients = 0
    if settings.stage == 3:
        gradients = settings.accumulation_bytes * share
    elif settings.whole_gradients:
        gradients = FP32_BYTES * everything
    host = 0
    if settings.offload_optimizer:
        # fp32 gradients for the optimizer; at stages 1, 2 the new weights on their way back; and accumulated
        # gradients, at stage 3 always.
        kept = gradients if settings.stage == 3 else s * share * (2 if accumulation > 1 else 1)
        host = master + moments + FP32_BYTES * share + kept
        master = moments = gradients = 0
    if settings.offload_parameters:
        host += s * share
        weights -= s * share
    return States(weights, master, moments, gradients, host)


def muon_elements(parameters: tuple[Parameter, ...], settings: EngineSettings) -> int:
    """Elements of the matrices that Muon steps, on one tensor rank."""
    return sum(p.elements for p in parameters if p.muon) if settings.muon else 0


def largest_group(parameters: tuple[Parameter, ...], settings: EngineSettings) -> int:
    """Elements of the largest group of the optimizer, without rules."""
    groups: dict[tuple[bool, bool, int], int] = {}
    for p in parameters:
        key = (p.decayed, settings.muon and p.muon, p.width)
        groups[key] = groups.get(key, 0) + p.elements
    return max(groups.values())


def _muon_bytes(
    parameters: tuple[Parameter, ...],
    settings: EngineSettings,
    data_parallel: int,
    tensor_parallel: int,
    device: DeviceType,
) -> int:
    """What Muon's update holds on the device (pretrain/engine/matrix_exchange.py): the matrices that are sent
    and those that arrive, in fp32, and about six tensors of the largest one while it is made orthogonal."""
    if not settings.muon:
        return 0
    elements = -(-muon_elements(parameters, settings) // data_parallel)
    copies = 1 if data_parallel * tensor_parallel == 1 else 2
    largest = tensor_parallel * max(p.elements for p in parameters if p.muon)
    compute = FP32_BYTES if device == "cpu" else 2
    return copies * FP32_BYTES * elements + largest * (3 * FP32_BYTES + 3 * compute)


def persistent_elements(parameters: tuple[Parameter, ...], settings: EngineSettings) -> int:
    """Stage 3: elements of the parameters that are small enough to stay whole on every rank."""
    return sum(p.elements for p in parameters if p.elements <= settings.persistence_threshold)


# ---------------------------------------------------------------------- peak


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of one rank, in bytes."""

    states: States
    activations: Activations
    buffers: Buffers
    gathered: int
    """Stage 3: parameters that are whole on the rank at the end of the forward pass."""
    gradients: int
    """Gradients that exist from the backward pass to the step."""
    phases: dict[str, int] = field(default_factory=dict)
    """The largest allocation on the device in each phase of a step."""

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Name of the phase with the peak."""
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

    - loss: every activation, the logits and their gradient, or the LM head's gradients where the loss is
    fused;
    - layers: from the last layer to the first, its activations and those before it, and the gradients made so
    far;
    - reduction: all gradients, no activations;
    - step: gradients, flattened for the optimizer.

    Each data-parallel rank stands for settings.context_parallel ranks, which also partition the states.
    """
    data_parallel *= settings.context_parallel
    parameters = rank_parameters(config, tensor_parallel)
    state_bytes = states(parameters, settings, data_parallel, accumulation)
    acts = activations(config, micro_batch, settings, tensor_parallel, device)
    gradients = _gradients(parameters, settings, data_parallel, accumulation)
    buffers = _buffers(parameters, settings, data_parallel, device)
    gathered = gathered_bytes(parameters, settings)
    embedding = parameters[0].elements * settings.compute_bytes
    # With tied embeddings the LM head's gradient waits through the backward pass for the embedding's to be
    # added.
    waiting = embedding if config.tied else 0
    base = state_bytes.device + gradients.before
    lasting = buffers.bucket if settings.stage == 3 else 0

    piled = gradients.piled * sum(p.elements for p in parameters)
    reduction = base + gradients.during + buffers.bucket + piled
    # The loss's last part makes the gradients of the LM head's weight and input from what the forward pass
    # kept.
    last = embedding + (acts.hidden if acts.head_gradient else 0)
    phases = {
        "loss": base + lasting + gathered + acts.total + max(acts.logits + acts.loss_chunks, last),
        "layers": base
        + buffers.bucket
        + waiting
        + _layers(config, settings, parameters, acts, gradients, buffers, gathered),
        "reduction": reduction + embedding + max(waiting, buffers.copies),
        "step": state_bytes.device
        + gradients.in_step
        + lasting
        + _muon_bytes(parameters, settings, data_parallel, tensor_parallel, device),
    }
    reported = max(gradients.before + gradients.during + piled, gradients.in_step)
    return MemoryPlan(state_bytes, acts, buffers, gathered, reported, phases)


def _layers(
    config: ModelConfig,
    settings: EngineSettings,
    parameters: tuple[Parameter, ...],
    acts: Activations,
    gradients: Gradients,
    buffers: Buffers,
    gathered: int,
) -> int:
    """The peak of the backward pass through the layers, beyond what it holds from its start to its end.

    Two moments count in each layer: inside its feed-forward network, where its own activations are still
    there, and at its end, where they are gone and a bucket is reduced.
    """
    by_layer: list[list[int]] = [[] for _ in range(config.num_layers)]
    for parameter in parameters:
        if parameter.name.startswith("layers."):
            by_layer[int(parameter.name.split(".")[1])].append(parameter.elements)
    made = 0 if config.tied else parameters[-1].elements  # elements whose gradients exist
    most = 0
    for layer in reversed(range(config.num_layers)):
        below = gathered + acts.outside + acts.documents + sum(acts.kept[:layer])
        # With checkpointing the layer has been computed again by now; what it keeps includes its input.
        inside = acts.per_layer[layer] + max(acts.working, acts.gathered) + gradients.piled * made
        # Nothing is reduced into the rank's partition while all that was made fits into one bucket.
        if made + max(by_layer[layer]) > settings.reduce_bucket:
            inside += gradients.during
        made += sum(by_layer[layer])
        end = acts.hidden + gradients.during + gradients.piled * made
        if not settings.whole_gradients:  # which are reduced after the backward pass
            end += settings.compute_bytes * max(by_layer[layer]) + buffers.copies
        most = max(most, below + max(inside, end))
        gathered = max(0, gathered - settings.compute_bytes * sum(by_layer[layer]))
    return most


def gathered_bytes(parameters: tuple[Parameter, ...], settings: EngineSettings) -> int:
    """Stage 3: bytes of parameters that are whole at the end of the forward pass.

    A parameter stays after its use if it is used again within the reuse distance. From a layer's forward pass
    to its backward pass, everything above it is used twice, so the upper half of that distance stays. Below
    that, what is prefetched stays, and the largest parameter in use.
    """
    if settings.stage < 3:
        return 0
    partitioned = sum(p.elements for p in parameters) - persistent_elements(parameters, settings)
    largest = max(p.elements for p in parameters)
    return settings.compute_bytes * min(
        partitioned, settings.reuse_distance // 2 + settings.prefetch_bucket + largest
    )


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients beyond the lasting buffers."""

    before: int
    """Gradients of earlier micro-batches, alive during all of the last one."""
    during: int
    """The rank's partition, which the backward pass of the last micro-batch fills."""
    piled: int
    """Per element: what the backward pass leaves in place, parameter by parameter."""
    in_step: int
    """Gradients alive in the optimizer's step."""


def _gradients(
    parameters: tuple[Parameter, ...], settings: EngineSettings, data_parallel: int, accumulation: int
) -> Gradients:
    """See deepspeed/runtime/bf16_optimizer.py, zero/stage_1_and_2.py and zero/stage3.py (reduce, epilogue,
    step)."""
    total = sum(p.elements for p in parameters)
    share = -(-total // data_parallel)
    s = settings.compute_bytes
    # Except where they are flat already, the gradients of one group at a time are flattened for the
    # optimizer.
    flattened = FP32_BYTES * -(-largest_group(parameters, settings) // data_parallel)
    accumulates = accumulation > 1
    if settings.stage == 3:
        return Gradients(0, 0, 0, 0 if settings.offload_optimizer else flattened)
    if settings.whole_gradients:  # those in .grad are set to zero, and freed after the step only
        return Gradients(s * total if accumulates else 0, 0, 0 if accumulates else s, s * total)
    partition = settings.accumulation_bytes * share
    if settings.separate_accumulation:  # one flat buffer, which the optimizer reads
        return Gradients(partition if accumulates else 0, 0 if accumulates else partition, 0, partition)
    if settings.offload_optimizer:  # accumulated in the host's memory
        return Gradients(0, s * max(p.elements for p in parameters), 0, 0)
    # Stage 1 keeps all gradients until the last micro-batch, stage 2 those of its partition.
    accumulated = s * total if settings.stage == 1 else partition
    return Gradients(accumulated if accumulates else 0, partition, 0, partition + flattened)


@dataclass(frozen=True)
class Buffers:
    """Bytes of the buffers that gradients are reduced in."""

    bucket: int
    """Reserved in full, from the first gradient to the end of the backward pass; at stage 3 always."""
    copies: int
    """Copies of what is reduced at a time: as much as fits a bucket, or one parameter that is larger."""


def _buffers(
    parameters: tuple[Parameter, ...], settings: EngineSettings, data_parallel: int, device: DeviceType
) -> Buffers:
    total = sum(p.elements for p in parameters)
    largest = max(p.elements for p in parameters)
    s, communication = settings.compute_bytes, settings.communication_bytes
    if settings.whole_gradients:  # reduced by the engine, all groups in one copy unless they are large
        group = largest_group(parameters, settings)
        copied = total if data_parallel > 1 and group <= ENGINE_BUCKET else 0
        # In fp32; for a reduction in bf16 narrowed once more, one group at a time where they are large.
        narrows = data_parallel > 1 and communication != FP32_BYTES
        narrowed = communication * (copied or group) if narrows else 0
        return Buffers(0, FP32_BYTES * max(copied, largest) + narrowed)
    reserved = settings.reduce_bucket * (2 if settings.overlap and settings.stage < 3 else 1)
    if device == "cpu":  # the system does not allocate memory that is never written to
        reserved = min(reserved, total)
    reduced = min(total, max(largest, settings.reduce_bucket))
    if settings.stage == 3:
        return Buffers(communication * reserved, communication * reduced if data_parallel > 1 else 0)
    copies = 0
    if settings.separate_accumulation:  # flattened as it is, then widened unless it is reduced as it is
        copies = (s + (communication if communication != s else 0)) * reduced
    elif data_parallel > 1:
        copies = s * reduced
    return Buffers(s * reserved, copies)
