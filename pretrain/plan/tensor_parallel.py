"""Bytes that tensor parallelism sends, layer by layer. Needs no torch.

``head-schedules presets exchange --model prism-124m --tensor_parallel 4`` prints the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig
from model.parallel_plan import FormName, check_split, check_tensor_parallel, choose_form, head_groups

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class LayerPlan:
    """One layer's plan. Bytes are those that one rank sends in the forward and backward pass of one
    micro-batch."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: int
    """g"""
    ranks: int
    """r = t / g: ranks that share whole heads; 1 needs no exchange."""
    form: FormName
    exchange_bytes: int
    """For the head exchange."""
    all_reduce_bytes: int
    """For the sums after o and down and, backward, before q, k, v and gate, up: what any tensor parallelism
    sends."""


@dataclass(frozen=True)
class ParallelPlan:
    """All layers of a model, at one degree and micro-batch."""

    tensor_parallel: int
    micro_batch: int
    context_length: int
    layers: tuple[LayerPlan, ...]
    outside_bytes: int
    """All-reduces outside the layers: embedding, LM head, and the loss's fp32 sums."""

    @property
    def exchange_bytes(self) -> int:
        """Bytes sent for the head exchange of all layers."""
        return sum(layer.exchange_bytes for layer in self.layers)

    @property
    def all_reduce_bytes(self) -> int:
        """Bytes sent for all-reduces, which any tensor parallelism needs."""
        return self.outside_bytes + sum(layer.all_reduce_bytes for layer in self.layers)


def plan_tensor_parallel(
    config: ModelConfig,
    tensor_parallel: int,
    micro_batch: int,
    dtype: str = "bf16",
    context_parallel: int = 1,
) -> ParallelPlan:
    """Plan a micro-batch of full sequences, of which context ranks have equal parts.

    Bytes are counted as a ring sends them: an all-reduce of n bytes sends 2 n (t-1)/t per rank, an all-gather
    to n bytes and an all-to-all of n bytes n (r-1)/r. Activation checkpointing, which repeats the forward
    pass, is left out.

    Raises:
        UserError: t does not divide the model, or the micro-batch cannot be split.
    """
    check_tensor_parallel(config, tensor_parallel)
    check_split(config, tensor_parallel, micro_batch, context_parallel)
    length = config.context_length // context_parallel
    t, size, tokens = tensor_parallel, DTYPE_BYTES[dtype], micro_batch * length
    layers = []
    for layer in range(config.num_layers):
        groups, ranks = head_groups(config.layer_kv_heads(layer), t)
        form = choose_form(ranks, micro_batch, length, layer)
        one_way = exchange_elements(
            form, ranks, tokens, config.attention_width(layer) // t, config.kv_width(layer) // t
        )
        sums = 2 * config.layer_writes(layer)  # forward and backward
        layers.append(
            LayerPlan(
                layer=layer,
                heads=config.heads[layer],
                kv_heads=config.layer_kv_heads(layer),
                head_dim=config.layer_head_dim(layer),
                groups=groups,
                ranks=ranks,
                form=form,
                exchange_bytes=2 * one_way * size,
                all_reduce_bytes=sums * _ring_bytes(tokens * config.layer_width(layer) * size, t),
            )
        )
    # Embedding forward, LM head backward; the largest, the sum and the label's logit of each token (fp64
    # at fp64). Every rank has a classifier's whole head.
    outside = _ring_bytes(tokens * config.d_model * size, t)
    if config.classes is None:
        outside += outside + _ring_bytes(3 * tokens * max(4, size), t)
    return ParallelPlan(t, micro_batch, config.context_length, tuple(layers), outside if t > 1 else 0)


def exchange_elements(form: FormName, ranks: int, tokens: int, query_width: int, kv_width: int) -> int:
    """Elements that a rank sends for one layer in one direction; the backward pass sends as many.

    Args:
        tokens: B T.
        query_width: columns of q on a rank, A_l / t.
        kv_width: columns of k, and of v, on a rank.
    """
    if form == "batch":  # q, k, v before attention, the output after
        return tokens * (2 * query_width + 2 * kv_width) * (ranks - 1) // ranks
    if form == "query":  # q before attention, the output after; k and v to all
        return tokens * 2 * query_width * (ranks - 1) // ranks + tokens * 2 * kv_width * (ranks - 1)
    return 0


def _ring_bytes(number: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce of *number* bytes."""
    return 2 * number * (ranks - 1) // ranks
