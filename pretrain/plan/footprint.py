"""Computes the parts of a run's memory by arithmetic: the parameters of a rank, and its activations.

pretrain/plan/memory.py puts them together. s is the size of a compute element in bytes (bf16 2, fp32
4), t the tensor-parallel degree, B T the tokens of a micro-batch. docs/memory.md compares the formulas with
measurements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from model.config import ModelConfig
from model.context_plan import ContextForm, context_form
from model.documents import varlen_head_dim
from model.kernels import flash_supports
from model.lm_head_loss import token_products
from model.loss import CHUNK_ELEMENTS
from model.parallel_plan import choose_form, head_groups
from model.parameters import is_hidden, parameter_specs, takes_muon
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
    muon: bool
    """Whether Muon steps it, in a run with Muon."""
    width: int
    """With parametrization mup: of its layer, if it is a matrix of one, whose rate depends on it; else 0."""


@functools.lru_cache(maxsize=256)  # a plan tries many micro-batches and degrees
def rank_parameters(config: ModelConfig, tensor_parallel: int = 1) -> tuple[Parameter, ...]:
    """The parameters of one tensor rank, in the model's order, vocabulary padding included."""
    parameters = []
    for name, spec in parameter_specs(config).items():
        shape = spec.shape
        if spec.vocabulary:
            shape = (config.padded_vocab_size(tensor_parallel), *shape[1:])
        ranks = 1 if spec.shard_dimension is None else tensor_parallel
        elements = math.prod(shape) // ranks
        role, width = spec.role, 0
        if config.parametrization == "mup" and is_hidden(role) and role.layer is not None:
            width = config.layer_width(role.layer)
        parameters.append(Parameter(name, elements, role.kind == "matrix", takes_muon(role), width))
    return tuple(parameters)


# ---------------------------------------------------------------------- activations


@dataclass(frozen=True)
class _Pass:
    """What a rank's activations depend on."""

    config: ModelConfig
    micro_batch: int
    settings: EngineSettings
    t: int
    device: DeviceType

    @property
    def element(self) -> int:
        """s: bytes of a compute element."""
        return self.settings.compute_bytes

    @property
    def c(self) -> int:
        """The context-parallel degree."""
        return self.settings.context_parallel

    @property
    def length(self) -> int:
        """T / c"""
        return self.config.context_length // self.c

    @property
    def tokens(self) -> int:
        """B T / c"""
        return self.micro_batch * self.length

    @property
    def parts(self) -> int:
        """Ranks that share a hidden state."""
        return self.t if self.settings.sequence_parallel else 1

    def norm(self, width: int, of_stream: bool) -> int:
        """Bytes of one norm's input, output and statistics for the backward pass.

        torch has no fused RMS norm on CPUs: the widened input and the normed values are kept in fp32 there.
        A norm of the first coordinates of the stream keeps all of it, unless it keeps them widened. With
        sequence parallelism the output is gathered.
        """
        tokens, s = self.tokens // self.parts, self.element
        gathered = self.tokens * width * s * (self.parts - 1) // self.parts
        copied = self.device == "cpu" and self.config.norm == "rmsnorm" and s < FP32_BYTES
        read = self.config.stream_width if of_stream and not copied else width
        if self.config.norm == "rmsnorm":
            kept = FP32_BYTES * (read + width) if self.device == "cpu" else s * read
            return tokens * (kept + s * width + FP32_BYTES) + gathered
        return tokens * (s * (read + width) + 2 * FP32_BYTES) + gathered

    def layer(self, layer: int) -> int:
        """Bytes that autograd keeps of one layer for its backward pass.

        Per token: both norms' inputs and outputs, 4 d s (outputs are what q, k, v and gate, up multiply; the
        first input is the whole stream where the layer has a narrower width d), and
        the norms' statistics in fp32; q, k, v as attention sees them and its output, (2 A + 2 A_kv) s / t,
        and 4 bytes of log-sum-exp a head; q and k before qk_norm; gate, up, the activation and the product,
        4 F s / t (plain: before and after the activation, 2 F s / t). A layer without attention or without a
        feed-forward network has neither its norm nor its part. Where heads are exchanged, the output
        is kept once more after its way back (A s / t), and the query form holds keys and values of all r
        ranks. On a GPU keys and values are as wide as queries where flash does not run. A windowed layer
        keeps its mask, T² s, once; with a document mask layers share theirs. Where context ranks exchange
        heads or gather keys, the output is kept once more, and a windowed layer that gathers keys has a mask
        of a chunk and the keys that it sees.
        """
        config, t, mask = self.config, self.t, self.settings.document_mask
        q, kv = config.attention_width(layer) // t, config.kv_width(layer) // t
        form, ranks = self.form(layer)
        context = self.context(layer)
        window = config.layer_window(layer)
        windowed = q > 0 and window is not None and window < config.context_length
        flash = flash_supports(self.element, config.layer_head_dim(layer))
        packed = mask and self.takes_offsets(layer)
        if (
            self.device == "cuda"
            and not packed
            and context.key_ranks == 1
            and (windowed or mask or not flash)
        ):
            kv = q  # only flash takes grouped queries, and without a mask
        held = kv * (ranks if form == "query" else 1)  # of keys, and as many of values
        attention = 2 * q + 2 * held + (q if form != "none" or self.c > 1 else 0)
        width = config.layer_ffn_width(layer)
        hidden = (4 if config.ffn == "swiglu" else 2) * width // t
        if config.attention_gate == "element":  # the gates, and the product
            attention += 2 * q
        elif config.attention_gate == "head":  # the gates, of each head and of each column, and the product
            attention += 2 * q + config.heads[layer]
        normed = 0
        if config.qk_norm != "none":  # what goes into the norms of q and k, as in norm()
            normed = (q + held) * (2 * FP32_BYTES if self.device == "cpu" else self.element)
        total = self.tokens * (
            self.element * (attention + hidden) + normed + FP32_BYTES * config.heads[layer] // t
        )
        norms = (q > 0) + (width > 0)
        total += sum(self.norm(config.layer_width(layer), of_stream=i == 0) for i in range(norms))
        reversed_queries = self.device == "cpu" and context.key_ranks > 1 and not mask
        if reversed_queries:
            total += 0 if windowed else self.tokens * self.element * q // 2
        elif windowed and window is not None and not mask:
            chunk, seen = config.context_length, config.context_length
            if context.key_ranks > 1:
                chunk = config.context_length // (2 * context.key_ranks)
                seen = chunk + window
            total += chunk * seen * self.element
        return total

    def context(self, layer: int) -> ContextForm:
        """How context ranks share the layer's attention."""
        return context_form(self.config, layer, self.c, self.t)

    def gathered_keys(self, layer: int) -> int:
        """Bytes of keys and values that the backward pass of a layer gathers again, one for each query head,
        with their gradients, and with what is added to these."""
        context = self.context(layer)
        if context.key_ranks == 1:
            return 0
        _, ranks = self.form(layer)
        heads = self.config.attention_width(layer) // self.t // context.head_ranks
        heads *= ranks if self.form(layer)[0] == "query" else 1
        return 3 * 2 * self.tokens * self.c * heads * self.element

    def form(self, layer: int) -> tuple[str, int]:
        """In which form ranks share the layer's heads, and how many share one."""
        _, ranks = head_groups(self.config.layer_kv_heads(layer), self.t)
        return choose_form(ranks, self.micro_batch, self.length, layer), ranks

    def takes_offsets(self, layer: int) -> bool:
        """Whether a layer keeps documents apart without a mask (model/documents.py: CUDA, bf16, whole
        sequences)."""
        whole = self.form(layer)[0] != "query" and self.context(layer).key_ranks == 1
        kernel = self.device == "cuda" and self.element == 2 and whole
        return kernel and varlen_head_dim(self.config.layer_head_dim(layer))

    def tables(self) -> int:
        """Bytes of rotary tables for a position: cosines and sines of half as many angles as dims are
        rotated, for each number of them and base."""
        return FP32_BYTES * sum(dims for dims, _ in self.config.rotary_kinds)

    def documents(self) -> int:
        """Bytes that a document mask adds to a micro-batch, shared by all layers: positions, rotary tables,
        masks.

        Per token a position, 8 bytes, and its row of the rotary tables. For each attention window a mask, B
        T² s, unless all its layers take the documents' offsets. Of its rows, a rank that gathers keys has
        those of its group.
        """
        T, layers = self.config.context_length, self.config.attention_layers
        masks = {
            (min(self.config.layer_window(i) or T, T), self.context(i).key_ranks)
            for i in layers
            if not self.takes_offsets(i)
        }
        rows = sum(T // ranks for _, ranks in masks)
        own = self.tokens * self.tables() if self.c > 1 else 0
        return self.micro_batch * (T * (8 + self.tables()) + rows * T * self.element) + own


def _fused_columns(config: ModelConfig, layer: int) -> int:
    """Columns of the products of q, k and v and of gate and up, on all ranks."""
    gated = 2 * config.layer_ffn_width(layer) if config.ffn == "swiglu" else 0
    return config.attention_width(layer) + 2 * config.kv_width(layer) + gated


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's activations on one rank."""

    per_layer: tuple[int, ...]
    """Kept from forward to backward pass, without activation checkpointing."""
    kept: tuple[int, ...]
    """Kept with the run's setting: with activation checkpointing, each layer's input only."""
    final_norm: int
    """The final norm's input, output and statistics; the output's gradient takes its place where the loss is
    fused."""
    outside: int
    """Ids, labels and rotary tables."""
    documents: int
    """What a document mask adds; 0 without one."""
    head_gradient: int
    """The fp32 gradient of the LM head's weight, which a fused loss makes in the forward pass; else 0."""
    logits: int
    """The logits in the compute precision; the backward pass of the loss holds as much again for their
    gradient. 0 where the loss is fused."""
    loss_chunks: int
    """The loss's chunks: logits, their softmax in fp32; where it is fused also its part of the head's
    gradient."""
    hidden: int
    """One hidden state."""
    working: int
    """Gradients of activations that the backward pass of a layer holds beyond what it has freed."""
    gathered: int = 0
    """With context parallelism, what the backward pass of a layer's attention gathers, and its gradients."""

    @property
    def total(self) -> int:
        """Bytes that are alive when the loss has been computed."""
        beside = (self.final_norm, self.outside, self.documents, self.head_gradient, self.logits)
        return sum(self.kept) + sum(beside)


def activations(
    config: ModelConfig,
    micro_batch: int,
    settings: EngineSettings,
    tensor_parallel: int = 1,
    device: DeviceType = "cuda",
) -> Activations:
    """Activations of a micro-batch of full sequences; see _Pass.layer for the formula."""
    t, d, s = tensor_parallel, config.d_model, settings.compute_bytes
    passed = _Pass(config, micro_batch, settings, t, device)
    tokens, columns = passed.tokens, config.classes or config.padded_vocab_size(t) // t
    layers = tuple(passed.layer(layer) for layer in range(config.num_layers))
    hidden = tokens // passed.parts * config.stream_width * s
    # In the feed-forward network: the gradients of the product and of both factors (plain: before and after
    # the activation), less the product that is free by then; and the gradient that comes in.
    work = hidden + tokens * s * (2 if config.ffn == "swiglu" else 1) * max(config.ffn_widths) // t
    fused = settings.fused != "none" and t == 1 and config.classes is None
    if fused:
        # The logits of a product, and a chunk's softmax or what is added to the LM head's gradient. On a CPU
        # torch widens the logits in a separate copy before it takes the softmax.
        chunks = token_products(tokens, columns, device)[0]
        narrow = s < FP32_BYTES
        softmax = FP32_BYTES * chunks[0].stop * (2 if narrow and device == "cpu" else 1)
        loss_chunks = columns * (s * chunks[-1].stop + max(softmax, d * s if narrow else 0))
    else:
        loss_chunks = LOSS_CHUNKS * FP32_BYTES * min(CHUNK_ELEMENTS[device], tokens * columns)
    if settings.fused == "all":  # the weights of fused products are copied together
        products = (
            s * config.layer_width(layer) * _fused_columns(config, layer) // t
            for layer in range(config.num_layers)
        )
        layers = tuple(map(sum, zip(layers, products, strict=True)))
    return Activations(
        per_layer=layers,
        kept=tuple(hidden for _ in layers) if settings.checkpointing else layers,
        final_norm=passed.norm(d, of_stream=True),
        # ids, labels and, unless the loss is fused, targets; log-sum-exp; mask
        outside=config.context_length * passed.tables()
        + tokens * (2 * 8 + 1 if fused else 3 * 8 + FP32_BYTES + 1)
        # with context parallelism all ids and labels, and a copy of the own ones; the own part of the tables
        + (passed.c > 1) * (passed.length * passed.tables() + 2 * 8 * tokens * passed.c),
        documents=passed.documents() if settings.document_mask else 0,
        head_gradient=FP32_BYTES * columns * d if fused else 0,
        logits=0 if fused else tokens * columns * s,
        loss_chunks=loss_chunks,
        hidden=hidden,
        working=work,
        gathered=max(map(passed.gathered_keys, range(config.num_layers))),
    )
