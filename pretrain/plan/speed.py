"""Predicts the time of a training step from counted work and the rates of a card.

A rank's products, attention and everything else, which moves bytes, follow one another. Work is counted for
compiled blocks in bf16; launches and communication are not in it. Rates are those that benchmarks/rates.py
measured on the card, or assumed shares of its data sheet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from model.config import ModelConfig
from model.declared import PositiveFloat, PositiveInt, declared, from_dict
from model.errors import UserError
from model.kernels import gpu_kernel
from model.lm_head_loss import token_products
from model.parameters import parameter_specs, takes_muon
from pretrain.config.sections import MuonConfig
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import EngineSettings
from pretrain.engine.matrix_exchange import describe_matrix
from pretrain.optim.muon import STEPS
from pretrain.plan.footprint import rank_parameters

By = Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]


@declared()
class Rates:
    """What one card does, in bf16."""

    source: str
    """Where the rates come from, for people."""
    products: By
    """FLOP/s of the products of a block, by the width of the residual stream."""
    attention: By
    """FLOP/s of causal attention, forward and backward, by head dim; hidden pairs do not count."""
    bytes: PositiveFloat
    """Bytes/s that kernels read and write which do little else."""


ASSUMED_PRODUCTS = {512: 0.5, 768: 0.55, 1024: 0.6, 1536: 0.68, 2048: 0.72}
ASSUMED_ATTENTION = {64: 0.15, 128: 0.23, 256: 0.2, 512: 0.06}
"""Of flash attention 2 at a context of 1,024, and of the memory-efficient kernel above 256."""
ASSUMED_BYTES = 0.8
UNCOMPILED = 3.0
"""Bytes of a step that is not compiled over those of a compiled one, without products and attention: by
benchmarks/traffic.py 2.9 at 124M."""
STEP_BYTES = 42
"""Per parameter that a rank steps: AdamW's fp32 master, moments and gradient read and written, the bf16
weight (30); the gradient read for its norm, read and written to be clipped (12)."""


def assumed_rates(peak: float, bandwidth: float) -> Rates:
    """The rates of a card that nobody has measured, from its data sheet: *peak* in FLOP/s, *bandwidth* of its
    memory in bytes/s."""
    return Rates(
        source="assumed shares of the data sheet",
        products={width: share * peak for width, share in ASSUMED_PRODUCTS.items()},
        attention={dim: share * peak for dim, share in ASSUMED_ATTENTION.items()},
        bytes=ASSUMED_BYTES * bandwidth,
    )


def read_rates(path: str) -> Rates:
    """The rates in a file that benchmarks/rates.py wrote. Raises UserError."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"rates: cannot read {path!r} ({error})") from None
    return from_dict(Rates, values, f"rates: {path}")


def rate_for(rates: Mapping[int, float], size: int) -> float:
    """The rate of the smallest size that is not below *size*, or of the largest."""
    return rates[min((known for known in rates if known >= size), default=max(rates))]


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step."""

    products: float
    """FLOPs of products in which parameters take part, recomputed ones included."""
    attention: dict[int, float]
    """FLOPs of attention by head dim."""
    bytes: float
    """Read and written by everything else."""

    def seconds(self, rates: Rates, width: int) -> float:
        """One after the other, for a residual stream of this width."""
        attention = sum(flops / rate_for(rates.attention, dim) for dim, flops in self.attention.items())
        return self.products / rate_for(rates.products, width) + attention + self.bytes / rates.bytes


def count_work(
    config: ModelConfig, settings: EngineSettings, batch: BatchPlan, t: int, *, compiled: bool
) -> Work:
    """Count a step of one rank.

    Products: 2 N FLOPs a token forward and 4 N backward, N the parameters in them, the LM head's padded rows
    included; 2 more for blocks that are recomputed; Muon's 2 (2 r² c + r³) for each of its iterations of a
    matrix of r <= c. Attention: two products forward and five backward (arXiv 2307.08691), of the pairs that
    its kernel computes: flash those that are seen, another kernel all of a layer with a window. Bytes a token
    of a block in bf16: 2 (22 d + 10 A + 11 F), as benchmarks/gpu_kernels.py counts them (swiglu; the plain
    network has 7 F), and of the loss three times the logits; then the sums of the LM head's gradient and the
    optimizer's step.
    """
    tokens = batch.micro_batch * config.context_length / settings.context_parallel
    per_layer, attention = 0.0, dict[int, float]()
    moved = 10.0 * config.d_model
    recomputed = 1 if settings.checkpointing else 0
    shards = t if settings.sequence_parallel else 1
    for layer in range(config.num_layers):
        width, heads = config.layer_ffn_width(layer), config.attention_width(layer)
        d, matrices = config.layer_width(layer), 3 if config.ffn == "swiglu" else 2
        columns = 2 * heads + 2 * config.kv_width(layer) + config.gate_width(layer)
        per_layer += d * (columns + matrices * width) / t
        streams = 11 * config.layer_writes(layer) * d / shards
        inside = 10 * heads + (11 if matrices == 3 else 7) * width
        moved += 2 * (1 + recomputed / 3) * (streams + inside / t)
        if heads:
            pairs = seen_keys(config, layer, settings)
            flops = (7 + 2 * recomputed) * 2 * tokens * pairs * heads / t
            dim = config.layer_head_dim(layer)
            attention[dim] = attention.get(dim, 0.0) + flops * batch.accumulation
    rows = config.padded_vocab_size(t)
    outputs = config.classes or rows
    head = outputs * config.d_model / t
    moved += 2 * 3 * outputs / t
    # Each product of the LM head's gradient is added to those before it in fp32 (10 bytes), then all scaled.
    summed = t == 1 and config.classes is None
    sums = len(token_products(math.ceil(tokens), rows, "cuda")) if summed else 0
    parameters = sum(parameter.elements for parameter in rank_parameters(config, t))
    products = tokens * (6 * (per_layer + head) + 2 * recomputed * per_layer) * batch.accumulation
    replicas = batch.data_parallel * settings.context_parallel
    products += muon_flops(config) / (replicas * t) if settings.muon else 0.0
    moved *= 1 if compiled else UNCOMPILED
    bytes_moved = batch.accumulation * (tokens * moved + (10 * sums + 22) * head)
    return Work(products, attention, bytes_moved + STEP_BYTES * parameters / replicas)


def seen_keys(config: ModelConfig, layer: int, settings: EngineSettings) -> float:
    """Keys that the layer's kernel computes with for a query, on the average."""
    length, window = config.context_length, config.layer_window(layer)
    if window is not None and window < length:
        # Without documents there is a mask, behind which the kernel computes everything.
        return window - window * window / (2 * length) if settings.document_mask else length
    math_kernel = gpu_kernel(2, config.layer_head_dim(layer), False, (9, 0)) == "math"
    return length if math_kernel else length / 2


def muon_flops(config: ModelConfig) -> float:
    """FLOPs of one step's iterations for all matrices of the model, taken as whole."""
    total = 0.0
    for spec in parameter_specs(config).values():
        if takes_muon(spec.role):
            rows, columns = sorted(describe_matrix(spec, config, MuonConfig()).shape)
            total += STEPS * 2 * (2 * rows * rows * columns + rows**3)
    return total
