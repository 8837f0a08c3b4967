"""Computes the parts of a run's memory by arithmetic: the parameters of a rank, and its activations.

pretrain/engine/memory/plan.py puts them together. s is the size of a compute element in bytes (bf16 2, fp32 4), t the
tensor-parallel degree, B T the tokens of a micro-batch. docs/memory.md has the formulas beside measurements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from model.attention import flash_takes
from model.config import ModelConfig
from model.documents import varlen_head_dim
from model.head_loss import token_products
from model.loss import CHUNK_ELEMENTS
from model.parallel_plan import choose_form, head_groups
from model.parameters import parameter_specs
from pretrain.engine.ds_config import FP32_BYTES, EngineSettings

DeviceType = Literal["cpu", "cuda"]

# Chunks of logits in fp32 that the backward pass of the plain loss holds.
LOSS_CHUNKS = 2


# ---------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank of the tensor group holds it."""

    name: str
    elements: int
    decayed: bool
    """Which of the optimizer's groups it is in when embeddings are not decayed."""


@functools.lru_cache(maxsize=256)  # a plan tries many micro-batches and degrees
def rank_parameters(config: ModelConfig, tensor_parallel: int = 1) -> tuple[Parameter, ...]:
    """The parameters of one tensor rank, in the model's order, vocabulary padding included."""
    parameters = []
    for name, spec in parameter_specs(config).items():
        shape = spec.shape
        if spec.vocabulary:
            shape = (config.padded_vocab_size(tensor_parallel), *shape[1:])
        ranks = 1 if spec.shard_dimension is None else tensor_parallel
        parameters.append(Parameter(name, math.prod(shape) // ranks, spec.role.kind == "matrix"))
    return tuple(parameters)


# ---------------------------------------------------------------------- activations


def layer_activation_bytes(
    config: ModelConfig,
    layer: int,
    micro_batch: int,
    element: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    device: DeviceType = "cuda",
    document_mask: bool = False,
) -> int:
    """Bytes that autograd keeps of one layer for its backward pass, on one rank.

    Per token: both norms' inputs and outputs, 4 d s (outputs are what q, k, v and gate, up multiply), and the norms'
    statistics in fp32; q, k, v as attention sees them and its output, (2 A + 2 A_kv) s / t, and 4 bytes of
    log-sum-exp a head; gate, up, the activation and the product, 4 W s / t (plain: before and after the activation,
    2 W s / t). Where heads are exchanged, the output is kept once more after its way back (A s / t), and the query form
    holds keys and values of all r ranks. On a GPU keys and values are as wide as queries where flash does not run. A
    windowed layer keeps its mask, T² s, once; with a document mask layers share theirs (document_bytes).
    """
    t, d = tensor_parallel, config.d_model
    tokens = micro_batch * config.context_length
    heads, kv_heads = config.heads[layer], config.layer_kv_heads(layer)
    q, kv = config.attention_width(layer) // t, config.kv_width(layer) // t
    _, ranks = head_groups(kv_heads, t)
    form = choose_form(ranks, micro_batch, config.context_length, layer)
    window = config.layer_window(layer)
    windowed = window is not None and window < config.context_length
    packed = document_mask and _takes_offsets(config, layer, micro_batch, element, tensor_parallel, device)
    flash = flash_takes(element, config.layer_head_dim(layer))
    if device == "cuda" and not packed and (windowed or document_mask or not flash):
        kv = q  # only flash takes grouped queries, and without a mask
    attention = 2 * q + 2 * kv * (ranks if form == "query" else 1)
    if form != "none":
        attention += q
    hidden = (4 if config.ffn == "swiglu" else 2) * config.ffn_width // t
    total = tokens * (element * (attention + hidden) + FP32_BYTES * heads // t)
    total += 2 * norm_bytes(config, tokens, element, tensor_parallel if sequence_parallel else 1, device)
    if sequence_parallel:
        total += 2 * tokens * d * element * (t - 1) // t  # the gathered outputs of the norms
    if windowed and not document_mask:
        total += config.context_length**2 * element
    return total


def document_bytes(
    config: ModelConfig, micro_batch: int, element: int, tensor_parallel: int, device: DeviceType
) -> int:
    """Bytes that a document mask adds to a micro-batch, shared by all layers: positions, rotary tables, masks.

    Per token a position, 8 bytes, and for each head dim its row of the rotary table, 4 d_h bytes. For each attention
    window a mask, B T² s, unless all its layers take the documents' offsets.
    """
    T, layers = config.context_length, range(config.num_layers)
    each_token = 8
    if config.positions == "rope":
        each_token += FP32_BYTES * sum({config.layer_head_dim(layer) for layer in layers})
    masks = set()
    for layer in layers:
        if not _takes_offsets(config, layer, micro_batch, element, tensor_parallel, device):
            masks.add(min(config.layer_window(layer) or T, T))
    return micro_batch * T * (each_token + len(masks) * T * element)


def _takes_offsets(
    config: ModelConfig, layer: int, micro_batch: int, element: int, tensor_parallel: int, device: DeviceType
) -> bool:
    """Whether a layer keeps documents apart without a mask (see model/documents.py: CUDA, bf16, whole sequences)."""
    _, ranks = head_groups(config.layer_kv_heads(layer), tensor_parallel)
    whole = choose_form(ranks, micro_batch, config.context_length, layer) != "query"
    return device == "cuda" and element == 2 and whole and varlen_head_dim(config.layer_head_dim(layer))


def norm_bytes(
    config: ModelConfig, tokens: int, element: int, parts: int = 1, device: DeviceType = "cuda"
) -> int:
    """Bytes of one norm's input, output and statistics for the backward pass; *parts* is t with sequence parallelism.

    torch has no fused RMS norm on CPUs: the widened input and the normed values are kept in fp32 there.
    """
    tokens //= parts
    if config.norm == "rmsnorm":
        input_bytes = 2 * FP32_BYTES if device == "cpu" else element
        return tokens * ((input_bytes + element) * config.d_model + FP32_BYTES)
    return tokens * (2 * element * config.d_model + 2 * FP32_BYTES)


def _joint_columns(config: ModelConfig, layer: int) -> int:
    """Columns of the products of q, k and v and of gate and up, on all ranks."""
    gated = 2 * config.ffn_width if config.ffn == "swiglu" else 0
    return config.attention_width(layer) + 2 * config.kv_width(layer) + gated


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's activations on one rank."""

    per_layer: tuple[int, ...]
    """Kept from forward to backward pass, without activation checkpointing."""
    kept: tuple[int, ...]
    """Kept with the run's setting: with activation checkpointing, each layer's input only."""
    final_norm: int
    """The final norm's input, output and statistics; the output's gradient takes its place where the loss is fused."""
    outside: int
    """Ids, labels and rotary tables."""
    documents: int
    """What a document mask adds (document_bytes), 0 without one."""
    head_gradient: int
    """The fp32 gradient of the output head's weight, which a fused loss makes in the forward pass; else 0."""
    logits: int
    """The logits in the compute precision; the backward pass of the loss holds as much again for their gradient. 0
    where the loss is fused."""
    loss_chunks: int
    """The loss's chunks: logits, their softmax in fp32; where it is fused also its part of the head's gradient."""
    hidden: int
    """One hidden state."""
    working: int
    """Gradients of activations that the backward pass of a layer holds beyond what it has freed."""

    @property
    def total(self) -> int:
        """Bytes that are alive when the loss has been computed."""
        return (
            sum(self.kept)
            + self.final_norm
            + self.outside
            + self.documents
            + self.head_gradient
            + self.logits
        )


def activations(
    config: ModelConfig,
    micro_batch: int,
    settings: EngineSettings,
    tensor_parallel: int = 1,
    device: DeviceType = "cuda",
) -> Activations:
    """Activations of a micro-batch of full sequences; see layer_activation_bytes for the formula."""
    t, d, s = tensor_parallel, config.d_model, settings.compute_bytes
    sequence_parallel = settings.sequence_parallel and t > 1
    tokens = micro_batch * config.context_length
    rank_tokens = tokens // t if sequence_parallel else tokens
    columns = config.classes or config.padded_vocab_size(t) // t
    layers = tuple(
        layer_activation_bytes(
            config, layer, micro_batch, s, t, sequence_parallel, device, settings.document_mask
        )
        for layer in range(config.num_layers)
    )
    hidden = rank_tokens * d * s
    # In the feed-forward network: the gradients of the product and of both factors (plain: before and after the
    # activation), less the product that is free by then; and the gradient that comes in.
    work = hidden + tokens * s * (2 if config.ffn == "swiglu" else 1) * config.ffn_width // t
    tables = 0
    if config.positions == "rope":
        dims = {config.layer_head_dim(layer) for layer in range(config.num_layers)}
        tables = config.context_length * FP32_BYTES * sum(dims)  # cosines and sines of d_h / 2 angles
    documents = document_bytes(config, micro_batch, s, t, device) if settings.document_mask else 0
    norm = norm_bytes(config, tokens, s, t if sequence_parallel else 1, device)
    if sequence_parallel:
        norm += tokens * d * s * (t - 1) // t
    fused = settings.fused != "none" and t == 1 and config.classes is None
    if fused:
        # The logits of a product, beside them a chunk's softmax, or what is added to the head's gradient. On a CPU
        # torch widens the logits in a copy of their own before it takes the softmax.
        chunks = token_products(tokens, columns, device)[0]
        narrow = s < FP32_BYTES
        softmax = FP32_BYTES * chunks[0].stop * (2 if narrow and device == "cpu" else 1)
        loss_chunks = columns * (s * chunks[-1].stop + max(softmax, d * s if narrow else 0))
    else:
        loss_chunks = LOSS_CHUNKS * FP32_BYTES * min(CHUNK_ELEMENTS[device], tokens * columns)
    if settings.fused == "all":  # the weights of joint products are copied together
        layers = tuple(
            layer_bytes + s * d * _joint_columns(config, layer) // t
            for layer, layer_bytes in enumerate(layers)
        )
    return Activations(
        per_layer=layers,
        kept=tuple(hidden for _ in layers) if settings.checkpointing else layers,
        final_norm=norm,
        # ids, labels and, unless the loss is fused, targets; log-sum-exp; mask
        outside=tables + tokens * (2 * 8 + 1 if fused else 3 * 8 + FP32_BYTES + 1),
        documents=documents,
        head_gradient=FP32_BYTES * columns * d if fused else 0,
        logits=0 if fused else tokens * columns * s,
        loss_chunks=loss_chunks,
        hidden=hidden,
        working=work,
    )
