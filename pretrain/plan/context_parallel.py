"""Bytes that context parallelism sends, layer by layer, and those of other methods. Needs no torch.

``head-schedules presets context --model prism-124m --context_parallel 8`` prints the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from model.config import ModelConfig
from model.context_plan import ContextForm, check_context_parallel, context_form, elements_sent
from model.parallel_plan import choose_form, head_groups
from pretrain.plan.tensor_parallel import DTYPE_BYTES


@dataclass(frozen=True)
class ContextLayer:
    """One layer's plan. Bytes are those that one rank sends in the forward and backward pass of one
    micro-batch."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    form: ContextForm
    sent_bytes: tuple[int, ...]
    """By index of the rank's group; they differ where a window hides keys."""


@dataclass(frozen=True)
class ContextPlan:
    """All layers of a model, at one degree and micro-batch."""

    context_parallel: int
    micro_batch: int
    layers: tuple[ContextLayer, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends, of each layer's busiest."""
        return sum(max(layer.sent_bytes) for layer in self.layers)


def plan_context_parallel(
    config: ModelConfig,
    context_parallel: int,
    tensor_parallel: int = 1,
    micro_batch: int = 1,
    dtype: str = "bf16",
    *,
    checkpointing: bool = False,
) -> ContextPlan:
    """Plan a micro-batch of full sequences.

    Bytes are counted as a ring sends them: an all-gather to n bytes, or a reduce-scatter or all-to-all of n
    bytes, sends n (r-1)/r. With activation *checkpointing* keys are gathered as often, but heads are
    exchanged once more.

    Raises:
        UserError: 2c does not divide the context length.
    """
    check_context_parallel(config, context_parallel, tensor_parallel)
    size, t, length = DTYPE_BYTES[dtype], tensor_parallel, config.context_length
    layers = []
    for layer in range(config.num_layers):
        form = context_form(config, layer, context_parallel, t)
        _, ranks = head_groups(config.layer_kv_heads(layer), t)
        query_form = choose_form(ranks, micro_batch, length // context_parallel, layer) == "query"
        widths = (
            config.attention_width(layer) // t,
            config.kv_width(layer) // t * (ranks if query_form else 1),
        )
        sent = elements_sent(form, *widths, length)
        if checkpointing:
            exchange = elements_sent(ContextForm(form.head_ranks, 1), *widths, length // form.key_ranks)[0]
            sent = [number + exchange // 2 for number in sent]
        layers.append(
            ContextLayer(
                layer=layer,
                heads=config.heads[layer],
                kv_heads=config.layer_kv_heads(layer),
                head_dim=config.layer_head_dim(layer),
                form=form,
                sent_bytes=tuple(number * micro_batch * size for number in sent),
            )
        )
    return ContextPlan(context_parallel, micro_batch, tuple(layers))


def ulysses_elements(config: ModelConfig, layer: int, context_parallel: int) -> int | None:
    """Elements that a rank sends for one layer and sequence where heads are exchanged for positions by all c
    ranks, forward and backward; None where c does not divide the heads.

    Fewer key/value heads than ranks are repeated, if they divide c (deepspeed 0.19.8,
    runtime/sequence_parallel/ulysses_sp.py).
    """
    c, heads, kv_heads = context_parallel, config.heads[layer], config.layer_kv_heads(layer)
    if not heads:
        return 0
    if heads % c or (kv_heads % c and c % kv_heads):
        return None
    columns = 2 * (heads + max(kv_heads, c)) * config.layer_head_dim(layer)
    return 2 * columns * (config.context_length // c) * (c - 1) // c


def gather_elements(config: ModelConfig, layer: int, context_parallel: int) -> int:
    """The same where all keys and values go round a ring, or are gathered, in the forward pass and again in
    the backward pass, and their gradients come back."""
    c = context_parallel
    return 3 * 2 * config.kv_width(layer) * (config.context_length // c) * (c - 1)


def describe_form(form: ContextForm) -> str:
    """What the context ranks of a layer do, in a phrase."""
    parts = [f"heads over {form.head_ranks}"] if form.head_ranks > 1 else []
    if form.key_ranks > 1:
        parts.append(f"keys {'seen ' if form.window is not None else ''}over {form.key_ranks}")
    return ", ".join(parts) or "-"


def describe_forms(config: ModelConfig, context_parallel: int, tensor_parallel: int = 1) -> str:
    """The form of every layer, neighbours together."""
    forms = [
        (layer, describe_form(context_form(config, layer, context_parallel, tensor_parallel)))
        for layer in range(config.num_layers)
    ]
    found = []
    for form, run in groupby(forms, key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        found.append(f"layers {span}: {form}" if len(layers) > 1 else f"layer {span}: {form}")
    return "; ".join(found)
