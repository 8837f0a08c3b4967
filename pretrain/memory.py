"""How much memory a rank of a run needs, by arithmetic: states by ZeRO stage, activations, buffers, and the peak.

The formulas follow what torch's autograd keeps for this model's operations and what DeepSpeed 0.19.8 allocates (files
named below); docs/memory.md derives them and compares them with real sessions. s is the size of a compute element in
bytes (bf16 2, fp32 4), P the parameters that a rank's part of the model has, N the data-parallel ranks, B T the tokens
of a micro-batch. No torch in here, and no process group: the numbers are for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from model.config import ModelConfig
from model.parallel_plan import choose_form, head_groups

FP32_BYTES = 4
MOMENTS = 2  # of AdamW

# Elements of logits that the loss takes to fp32 at a time (model/loss.py, CHUNK_ELEMENTS), and how many such
# chunks it holds at once in the backward pass.
LOSS_CHUNK = {"cpu": 2**18, "cuda": 2**24}
LOSS_CHUNKS = 2
# Above this many gradient elements the engine all-reduces a group on its own, without copying it beside the others
# (deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE).
ENGINE_BUCKET = 500_000_000


@dataclass(frozen=True)
class ZeroSettings:
    """What memory and communication depend on in a ds_config."""

    stage: int
    bf16: bool
    offload_optimizer: bool = False
    """Master weights, moments and the optimizer's gradients live in the host's memory."""
    offload_parameters: bool = False
    """At stage 3, the parameter partitions live in the host's memory."""
    accumulation_bytes: int = FP32_BYTES
    """Size of an accumulated gradient element."""
    communication_bytes: int = FP32_BYTES
    """Size of a gradient element while it is reduced."""
    reduce_bucket: int = 500_000_000
    """Elements of one reduction buffer."""
    overlap: bool = False
    """Whether a second reduction buffer is filled while the first is reduced."""
    prefetch_bucket: int = 50_000_000
    """Stage 3: elements gathered ahead of use."""
    reuse_distance: int = 1_000_000_000
    """Stage 3: a gathered parameter stays if it is used again within so many elements."""
    persistence_threshold: int = 100_000
    """Stage 3: parameters of at most so many elements are never partitioned."""

    @classmethod
    def from_ds_config(cls, ds_config: Mapping[str, Any], bf16: bool) -> ZeroSettings:
        """Read a ds_config that pretrain.engine.read_ds_config accepted; absent values are DeepSpeed's defaults."""
        zero = ds_config["zero_optimization"]
        stage = zero["stage"]
        compute = 2 if bf16 else FP32_BYTES
        sizes = {"fp32": FP32_BYTES, "float32": FP32_BYTES, "bf16": 2, "bfloat16": 2, "fp16": 2}
        accumulation = ds_config.get("data_types", {}).get("grad_accum_dtype")
        communication = ds_config.get("communication_data_type")
        optional = {
            "reduce_bucket": ("reduce_bucket_size",),
            "prefetch_bucket": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
            "reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
            "persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        }
        found = {
            name: int(zero[key])
            for name, keys in optional.items()
            for key in keys
            if isinstance(zero.get(key), int | float)
        }
        return cls(
            stage=stage,
            bf16=bf16,
            offload_optimizer=_device(zero, "offload_optimizer") != "none",
            offload_parameters=stage == 3 and _device(zero, "offload_param") != "none",
            accumulation_bytes=sizes.get(accumulation, compute),
            communication_bytes=sizes.get(communication, compute),
            overlap=bool(zero.get("overlap_comm", stage == 3)),
            **found,
        )

    @property
    def compute_bytes(self) -> int:
        """s: bytes of an element of weights and activations."""
        return 2 if self.bf16 else FP32_BYTES

    @property
    def whole_gradients(self) -> bool:
        """Whether DeepSpeed's BF16_Optimizer runs, which keeps fp32 gradients of all parameters on every rank.

        It is chosen at stage 1 with bf16 weights, fp32 accumulation and no offload.
        """
        return (
            self.stage == 1
            and self.bf16
            and self.accumulation_bytes == FP32_BYTES
            and not self.offload_optimizer
        )

    @property
    def separate_accumulation(self) -> bool:
        """Whether gradients are accumulated in another precision than the one they are computed in."""
        return self.accumulation_bytes != self.compute_bytes


def _device(zero: Mapping[str, Any], section: str) -> str:
    found = zero.get(section) or {}
    return str(found.get("device", "none"))


# ---------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank of the tensor group holds it."""

    name: str
    elements: int
    decayed: bool
    """Which of the optimizer's groups it is in when embeddings are not decayed."""


def rank_parameters(config: ModelConfig, tensor_parallel: int = 1) -> list[Parameter]:
    """The parameters of one tensor rank, in the model's order, vocabulary padding included.

    Column- and row-parallel matrices, biases of the former and the token embedding are cut into t equal parts; norms,
    biases of row-parallel layers and learned positions are whole on every rank.
    """
    t, d = tensor_parallel, config.d_model
    rows = config.padded_vocab_size(t) // t
    norm = [("weight", d)] + ([("bias", d)] if config.norm_bias else [])
    found = [Parameter("token_embedding.weight", rows * d, False)]
    if config.positions == "learned":
        found.append(Parameter("position_embedding.weight", config.context_length * d, False))
    for layer in range(config.num_layers):
        q, kv, f = config.attention_width(layer) // t, config.kv_width(layer) // t, config.ffn_width // t
        columns = {"q": q, "k": kv, "v": kv}
        block: list[tuple[str, int, int, bool]] = []  # name, matrix, bias, has a bias
        for name, width in columns.items():
            block.append((f"attention.{name}", d * width, width, config.attention_bias == "all"))
        block.append(("attention.o", q * d, d, config.attention_bias != "none"))
        for name in ("gate", "up") if config.ffn == "swiglu" else ("up",):
            block.append((f"ffn.{name}", d * f, f, config.ffn_bias))
        block.append(("ffn.down", f * d, d, config.ffn_bias))
        for kind, start in (("attention", 0), ("ffn", 4)):
            found += [Parameter(f"layers.{layer}.{kind}_norm.{name}", size, False) for name, size in norm]
            for name, matrix, bias, has_bias in block[:4] if start == 0 else block[4:]:
                found.append(Parameter(f"layers.{layer}.{name}.weight", matrix, True))
                if has_bias:
                    found.append(Parameter(f"layers.{layer}.{name}.bias", bias, False))
    found += [Parameter(f"final_norm.{name}", size, False) for name, size in norm]
    if not config.tie_embeddings:
        found.append(Parameter("output.weight", rows * d, True))
    return found


# ---------------------------------------------------------------------- activations


def layer_activation_bytes(
    config: ModelConfig,
    layer: int,
    micro_batch: int,
    element: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> int:
    """What autograd keeps of one layer for its backward pass, in bytes on one rank.

    Per token: both norms' inputs and outputs, 4 d s (outputs are what q, k, v and gate, up multiply), and the norms'
    statistics in fp32; q, k, v as attention sees them and its output, (2 A + 2 A_kv) s / t, and 4 bytes of
    log-sum-exp a head; gate, up, the activation and the product, 4 W s / t (plain: before and after the activation,
    2 W s / t). Where heads are exchanged, the output is kept once more after its way back (A s / t), and the query form
    holds keys and values of all r ranks. A windowed layer keeps its mask, T² s, once.
    """
    t, d = tensor_parallel, config.d_model
    tokens = micro_batch * config.context_length
    heads, kv_heads = config.heads[layer], config.layer_kv_heads(layer)
    q, kv = config.attention_width(layer) // t, config.kv_width(layer) // t
    _, ranks = head_groups(kv_heads, t)
    form = choose_form(ranks, micro_batch, config.context_length, layer)
    attention = 2 * q + 2 * kv * (ranks if form == "query" else 1)
    if form != "none":
        attention += q
    hidden = (4 if config.ffn == "swiglu" else 2) * config.ffn_width // t
    total = tokens * (element * (attention + hidden) + FP32_BYTES * heads // t)
    total += 2 * norm_bytes(config, tokens, element, tensor_parallel if sequence_parallel else 1, device)
    if sequence_parallel:
        total += 2 * tokens * d * element * (t - 1) // t  # the gathered outputs of the norms
    window = config.layer_window(layer)
    if window is not None and window < config.context_length:
        total += config.context_length**2 * element
    return total


def norm_bytes(config: ModelConfig, tokens: int, element: int, parts: int = 1, device: str = "cuda") -> int:
    """Input, output and statistics of one norm, for the backward pass; *parts* is t with sequence parallelism.

    torch has no fused RMS norm on CPUs: the widened input and the normed values are kept in fp32 there.
    """
    tokens //= parts
    if config.norm == "rmsnorm":
        kept = 2 * FP32_BYTES if device == "cpu" else element
        return tokens * ((kept + element) * config.d_model + FP32_BYTES)
    return tokens * (2 * element * config.d_model + 2 * FP32_BYTES)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank."""

    per_layer: tuple[int, ...]
    """Kept from forward to backward pass, without activation checkpointing."""
    kept: tuple[int, ...]
    """Kept with the run's setting: with activation checkpointing, each layer's input only."""
    outside: int
    """Final norm, labels and rotary tables."""
    logits: int
    """The logits in the compute precision; the backward pass of the loss holds as much again for their gradient."""
    loss_chunks: int
    """The loss's fp32 chunks."""
    working: tuple[int, ...]
    """Gradients of activations that the backward pass of a layer holds beyond what it has freed."""

    @property
    def total(self) -> int:
        """All that is alive when the loss has been computed."""
        return sum(self.kept) + self.outside + self.logits


def activations(
    config: ModelConfig,
    micro_batch: int,
    zero: ZeroSettings,
    tensor_parallel: int = 1,
    *,
    checkpointing: bool = False,
    sequence_parallel: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> Activations:
    """Activations of a micro-batch of full sequences; see layer_activation_bytes for the formula."""
    t, d, s = tensor_parallel, config.d_model, zero.compute_bytes
    tokens = micro_batch * config.context_length
    own_tokens = tokens // t if sequence_parallel else tokens
    columns = config.padded_vocab_size(t) // t
    layers = tuple(
        layer_activation_bytes(config, layer, micro_batch, s, t, sequence_parallel, device)
        for layer in range(config.num_layers)
    )
    hidden = own_tokens * d * s
    width = config.ffn_width // t
    # At its largest in the feed-forward network: the gradients of the product and of both factors, or of the plain
    # network's hidden values, less the product that is free by then; and three hidden states.
    work = tokens * s * (2 if config.ffn == "swiglu" else 1) * width + 3 * tokens * d * s
    tables = 0
    if config.positions == "rope":
        dims = {config.layer_head_dim(layer) for layer in range(config.num_layers)}
        tables = config.context_length * FP32_BYTES * sum(dims)  # cosines and sines of d_h / 2 angles
    norm = norm_bytes(config, tokens, s, t if sequence_parallel else 1, device)
    if sequence_parallel:
        norm += tokens * d * s * (t - 1) // t
    return Activations(
        per_layer=layers,
        kept=tuple(hidden for _ in layers) if checkpointing else layers,
        outside=norm + tokens * (8 + 8 + 8 + FP32_BYTES + 1) + tables,  # ids, labels, targets; log-sum-exp; mask
        logits=tokens * columns * s,
        loss_chunks=LOSS_CHUNKS * FP32_BYTES * min(LOSS_CHUNK[device], tokens * columns),
        working=tuple(work for _ in layers),
    )


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


def states(parameters: list[Parameter], zero: ZeroSettings, data_parallel: int) -> States:
    """Weights, optimizer state and lasting gradient buffers by ZeRO stage (arXiv 1910.02054).

    Partitions are rounded up; DeepSpeed's padding to a multiple of 2 N elements a group is left out.
    """
    everything = sum(parameter.elements for parameter in parameters)
    share = -(-everything // data_parallel)
    s = zero.compute_bytes
    weights = s * everything
    if zero.stage == 3:
        weights = s * (share + _persistent(parameters, zero))
    master = FP32_BYTES * share
    moments = MOMENTS * FP32_BYTES * share
    gradients = 0
    if zero.stage == 3:
        gradients = zero.accumulation_bytes * share
    elif zero.whole_gradients:
        gradients = FP32_BYTES * everything
    host = 0
    if zero.offload_optimizer:
        # fp32 gradients for the optimizer; at stages 1, 2 the new weights on their way back, at stage 3 the
        # accumulated gradients.
        host = master + moments + FP32_BYTES * share + (gradients if zero.stage == 3 else s * share)
        master = moments = gradients = 0
    if zero.offload_parameters:
        host += s * share
        weights -= s * share
    return States(weights, master, moments, gradients, host)


def _persistent(parameters: list[Parameter], zero: ZeroSettings) -> int:
    return sum(p.elements for p in parameters if p.elements <= zero.persistence_threshold)


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
    zero: ZeroSettings,
    data_parallel: int,
    micro_batch: int,
    accumulation: int = 1,
    tensor_parallel: int = 1,
    *,
    checkpointing: bool = False,
    sequence_parallel: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> MemoryPlan:
    """Predict what one rank allocates, as the largest of four moments of a steady step.

    - loss: every activation, the logits and their gradient;
    - layers: from the last layer to the first, its activations and those before it, and the gradients made so far;
    - reduction: all gradients, no activations;
    - step: gradients, flattened for the optimizer.
    """
    parameters = rank_parameters(config, tensor_parallel)
    kept = states(parameters, zero, data_parallel)
    acts = activations(
        config,
        micro_batch,
        zero,
        tensor_parallel,
        checkpointing=checkpointing,
        sequence_parallel=sequence_parallel,
        device=device,
    )
    total = sum(p.elements for p in parameters)
    s = zero.compute_bytes

    before, during, flattened = _gradients(parameters, zero, data_parallel, accumulation)
    buffers = _buffers(parameters, zero, data_parallel)
    lasting = buffers.bucket if zero.stage == 3 else 0
    gathered = _gathered(parameters, zero)
    embedding = parameters[0].elements * s
    tied = embedding if config.tie_embeddings else 0  # the head's gradient waits for the embedding's to be added
    base = kept.device + before

    forward = base + lasting + gathered + acts.total
    phases = {"loss": forward + max(acts.logits + acts.loss_chunks, embedding)}

    hidden = 3 * micro_batch * config.context_length * config.d_model * s
    by_layer = layer_elements(config, parameters)
    made = 0 if tied else parameters[-1].elements  # gradients so far
    layers, whole = 0, gathered
    for layer in reversed(range(config.num_layers)):
        below = base + buffers.bucket + whole + acts.outside + tied + sum(acts.kept[:layer])
        inside = acts.kept[layer] + (acts.per_layer[layer] if checkpointing else 0) + acts.working[layer]
        # No bucket has been reduced into the rank's partition while all that was made still fits into one.
        inside += during if made + max(by_layer[layer]) > zero.reduce_bucket else 0
        piled = s * made if zero.whole_gradients and accumulation == 1 else 0
        layers = max(layers, below + inside + piled)
        made += sum(by_layer[layer])
        at_end = hidden + during + s * max(by_layer[layer]) + (0 if zero.whole_gradients else buffers.copies)
        layers = max(layers, below + piled + at_end)
        whole = max(0, whole - s * sum(by_layer[layer]))
    phases["layers"] = layers

    # At the end the embedding's gradient, with tied embeddings beside the head's, to which it is added.
    last = tied + embedding
    piled = s * total if zero.whole_gradients and accumulation == 1 else 0
    phases["reduction"] = base + during + buffers.bucket + max(last + piled, buffers.copies + embedding + piled)
    phases["step"] = kept.device + flattened + lasting
    reported = buffers.bucket + buffers.copies
    return MemoryPlan(kept, acts, reported, gathered, max(before + during, flattened), phases)


def _gathered(parameters: list[Parameter], zero: ZeroSettings) -> int:
    """Stage 3: bytes of parameters that are whole at the end of the forward pass.

    A parameter stays after its use if it is used again within the reuse distance. From a layer's forward pass to its
    backward pass, everything above it goes by twice, so the upper half of that distance stays; below that, what is
    prefetched does, and the largest parameter that is in use.
    """
    if zero.stage < 3:
        return 0
    rest = sum(p.elements for p in parameters) - _persistent(parameters, zero)
    largest = max(p.elements for p in parameters)
    return zero.compute_bytes * min(rest, zero.reuse_distance // 2 + zero.prefetch_bucket + largest)


def layer_elements(config: ModelConfig, parameters: list[Parameter]) -> list[list[int]]:
    """Elements of each layer's parameters."""
    sizes: list[list[int]] = [[] for _ in range(config.num_layers)]
    for parameter in parameters:
        if parameter.name.startswith("layers."):
            sizes[int(parameter.name.split(".")[1])].append(parameter.elements)
    return sizes


def _gradients(
    parameters: list[Parameter], zero: ZeroSettings, data_parallel: int, accumulation: int
) -> tuple[int, int, int]:
    """Gradient bytes beyond the lasting buffers.

    Returns:
        Those of earlier micro-batches, alive all through the last one; those that its backward pass adds; and those
        alive in the optimizer's step.
    """
    total = sum(p.elements for p in parameters)
    share = -(-total // data_parallel)
    s, decayed = zero.compute_bytes, sum(p.elements for p in parameters if p.decayed)
    group = -(-max(decayed, total - decayed) // data_parallel)
    if zero.stage == 3:  # the accumulated partition lasts; a group at a time is flattened for the optimizer
        return 0, 0, 0 if zero.offload_optimizer else FP32_BYTES * group
    if zero.whole_gradients:
        # What backward leaves in .grad is set to zero, not freed, until the step is over.
        return (s * total if accumulation > 1 else 0), 0, s * total
    partition = zero.accumulation_bytes * share
    if zero.separate_accumulation:  # one flat fp32 buffer, which is also what the optimizer reads
        return (partition if accumulation > 1 else 0), (partition if accumulation == 1 else 0), partition
    if zero.offload_optimizer:  # accumulated on the host
        return 0, s * max(p.elements for p in parameters), 0
    if zero.stage == 1 and accumulation > 1:  # whole until the last micro-batch
        return s * total, partition, partition + FP32_BYTES * group
    return (partition if accumulation > 1 else 0), partition, partition + FP32_BYTES * group


@dataclass(frozen=True)
class Buffers:
    """Bytes that reducing gradients takes."""

    bucket: int
    """Reserved whole, from the first gradient to the end of the backward pass; at stage 3 for good."""
    copies: int
    """Of what is reduced at a time: as much as fits a bucket, or one parameter that is larger."""


def _buffers(parameters: list[Parameter], zero: ZeroSettings, data_parallel: int) -> Buffers:
    total = sum(p.elements for p in parameters)
    largest = max(p.elements for p in parameters)
    s = zero.compute_bytes
    if zero.whole_gradients:  # reduced by the engine, groups side by side in one copy unless they are large
        decayed = sum(p.elements for p in parameters if p.decayed)
        copied = total if data_parallel > 1 and decayed <= ENGINE_BUCKET else 0
        return Buffers(0, FP32_BYTES * max(copied, largest))
    reduced = min(total, max(largest, zero.reduce_bucket))
    if zero.stage == 3:
        copies = zero.communication_bytes * reduced if data_parallel > 1 else 0
        return Buffers(zero.communication_bytes * zero.reduce_bucket, copies)
    copies = 0
    if zero.separate_accumulation:  # flattened as it is, then widened for the reduction
        copies = (s + zero.communication_bytes) * reduced
    elif data_parallel > 1:
        copies = s * reduced
    return Buffers(s * zero.reduce_bucket * (2 if zero.overlap else 1), copies)
