"""Measures every layer of a network in training: what enters its attention, and what a new head would learn.

The network reads the global batch of the next step, each rank its micro-batches, in ordinary forward passes.
Up to rounding, the measurements depend neither on the number of ranks nor on the micro-batch. No training
number changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import Attention, BlockInputs, Heads, attend
from model.collectives import gather_sequence
from model.config import ModelConfig
from model.context import all_positions
from model.context_plan import zigzag
from model.documents import PackedDocuments
from model.loss import IGNORED_LABEL
from model.parameters import parameter_specs
from model.rotary import rotate
from model.transformer import Block, Transformer
from pretrain.diagnostics.forward import prepare_measurement
from pretrain.diagnostics.weights import OwnWeights, projections
from pretrain.runtime.world import World


class Candidate(NamedTuple):
    """The weights of a head that may be added to a layer, fp32 [d_h, d]; its output projection is zero."""

    query: Tensor
    key: Tensor
    value: Tensor


def second_moments(engine: Any, batches: Sequence[list[Tensor]], world: World) -> list[Tensor]:
    """E[x xᵀ] by layer, fp32 [d, d]: x the normalized vectors that enter its attention, a mean over all
    ranks' tokens.

    Collective. *batches* are this rank's micro-batches, as many as any other's, each as Transformer.forward
    takes it.
    """
    sums: dict[int, Tensor] = {}
    masks = [_mask_examples(engine.module, batch) for batch in batches]
    share = _tokens_of_a_pass(masks, world)

    with prepare_measurement(engine) as (network, hooks), _skip_lm_head(engine), torch.no_grad():
        counted: Tensor | None = None

        def record(layer: int, module: Any, inputs: tuple[Any, ...]) -> None:
            # [B T, d]; with sequence or context parallelism a part of T
            rows = inputs[0].detach().flatten(0, -2).float()
            if counted is not None:
                rows = rows[counted]
            moment = rows.T @ rows / (share or len(rows))
            sums[layer] = sums[layer] + moment if layer in sums else moment

        for layer in range(len(network.layers)):
            attention = _attention(network, layer)
            hooks.callback(attention.register_forward_pre_hook(partial(record, layer)).remove)
        for batch, mask in zip(batches, masks, strict=True):
            counted = None if mask is None else mask.to(world.device)
            engine(*(tensor.to(world.device) for tensor in batch))
    moments = [sums[layer] / len(batches) for layer in range(len(sums))]
    if world.size > 1:
        for moment in moments:
            dist.all_reduce(moment)
    return [moment / world.size for moment in moments]


def _tokens_of_a_pass(masks: Sequence[Tensor | None], world: World) -> float | None:
    """The tokens that count in a pass of one rank, on the average over all; None where every pass counts as
    many. Collective."""
    counts = [mask.sum() for mask in masks if mask is not None]
    if not counts:
        return None
    tokens = torch.stack(counts).sum().double().to(world.device)
    if world.size > 1:  # the ranks of a tensor group count theirs again, as their moments are summed again
        dist.all_reduce(tokens)
    return tokens.item() / (world.size * len(masks))


@contextmanager
def _skip_lm_head(engine: Any) -> Iterator[None]:
    """Leave LM head and loss out of forward passes: a fifth of a small model's check, and more with a large
    vocabulary.

    At ZeRO stage 3, which gathers ahead by the order of the pass before, they stay.
    """
    network: Transformer = engine.module
    if engine.zero_optimization_stage() == 3:
        yield
        return
    network.loss_of = lambda hidden, labels: hidden.new_zeros(())  # type: ignore[method-assign]
    try:
        yield
    finally:
        del network.loss_of


def query_and_key_weights(engine: Any, config: ModelConfig, world: World) -> dict[str, Tensor]:
    """The fp32 masters of W_Q and W_K [A, d] of all layers by name, on every rank's CPU. Collective."""
    own = OwnWeights(engine, projections(config), parameter_specs(config))
    return dict(own.gather_full(world))


def gradient_norms(
    engine: Any, batches: Sequence[list[Tensor]], candidates: Mapping[int, Candidate], world: World
) -> dict[int, float]:
    """‖∂loss/∂W_o‖_F that a candidate head of each layer would get at once; its output projection is zero.
    Collective.

    In the manner of GradMax (arXiv 2201.05125): with the output projection at zero, nothing else of the head
    has a gradient, and this one is Σ_t g_t o_tᵀ with g_t the loss's gradient in the attention's output at
    position t and o_t the head's output there. Of the loss that is trained, with its z loss: a mean over
    *batches* (see second_moments) and all ranks.
    """
    inputs: dict[int, tuple[Any, ...]] = {}
    outputs: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    with prepare_measurement(engine) as (network, hooks), torch.enable_grad():
        network.training = True  # the network's own loss; its modules stay in evaluation mode, for the hooks

        def record(layer: int, module: Any, given: tuple[Any, ...], output: Tensor) -> None:
            inputs[layer], outputs[layer] = given, output

        for layer in candidates:
            attention = _attention(network, layer)
            hooks.callback(attention.register_forward_hook(partial(record, layer)).remove)
        for batch in batches:
            loss = network(*(tensor.to(world.device) for tensor in batch))
            gradients = torch.autograd.grad(loss, [outputs[layer] for layer in candidates])
            for layer, gradient in zip(candidates, gradients, strict=True):
                weight = _output_gradient(network, layer, gradient, inputs[layer], candidates[layer])
                weights[layer] = weights[layer] + weight if layer in weights else weight
    passes, c = world.data_parallel * len(batches), world.context_parallel
    if c > 1:  # gradients are c times those of a rank's positions
        for weight in weights.values():
            dist.all_reduce(weight, group=world.grid.context_group)
            weight /= c
    return {
        layer: torch.linalg.matrix_norm(world.sum(weights[layer]) / passes).item() for layer in candidates
    }


@torch.no_grad()
def _output_gradient(
    network: Transformer, layer: int, gradient: Tensor, given: tuple[Any, ...], head: Candidate
) -> Tensor:
    """The gradient [d, d_h] of a head's output projection, fp32, from that of an attention module's output
    and what the module was *given*."""
    output = _head_output(network, layer, given, head)
    if network.grid.sequence_parallel:
        gradient = gather_sequence(gradient, network.grid.tensor_group)
    return gradient.float().flatten(0, 1).T @ output.float().flatten(0, 1)


def _mask_examples(network: Transformer, batch: list[Tensor]) -> Tensor | None:
    """Which positions of a classifier's micro-batch are of an example, bool [B T]; None where all are."""
    if network.config.classes is None:
        return None
    labelled = batch[1] != IGNORED_LABEL  # at an example's end; padding follows
    return (labelled.flip(1).cumsum(1).flip(1) > 0).flatten()


def _attention(network: Transformer, layer: int) -> Attention:
    return cast(Attention, cast(Block, network.layers[layer]).attention)  # growth is for layers that have one


def _head_output(network: Transformer, layer: int, given: tuple[Any, ...], head: Candidate) -> Tensor:
    """The output [B, T, d_h] of a head on what an attention module was *given* (see Attention.forward), at
    the positions that this rank holds."""
    hidden, inputs = given[0], BlockInputs(*given[1:])
    attention, mask = _attention(network, layer), inputs.mask
    if network.grid.sequence_parallel:
        hidden = gather_sequence(hidden, network.grid.tensor_group)
    query, key, value = ((hidden @ weight.to(hidden).T)[:, :, None] for weight in head)  # [B, T, 1, d_h]
    if attention.q_norm is not None and attention.k_norm is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    if inputs.table is not None:
        query, key = rotate(query, inputs.table), rotate(key, inputs.table)
    length, spans, rows = hidden.shape[1] * network.grid.context_parallel, None, None
    if inputs.offsets is not None:  # a kernel keeps packed documents apart; here a mask does
        documents = PackedDocuments(inputs.offsets, len(hidden), length, hidden.dtype)
        mask = documents.mask(attention.window)
    if context := attention.context:
        key, value = (all_positions(part, network.grid) for part in (key, value))
        spans = zigzag(network.grid.context_rank, network.grid.context_parallel, length)
        rows = [context.mask_rows(span, length) for span in spans] if context.ranks > 1 else None
    heads = Heads(query, key, value, mask, spans=spans, rows=rows)
    output = attend(heads, attention.scale, attention.window).flatten(2)
    return output if network.config.attention_gate == "none" else output / 2  # by the gates of a new head
