"""Measures every layer of a network in training: what enters its attention, and what a new head would learn.

The network reads the micro-batch that every rank takes next, with its own forward pass. No training number
changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention import Attention, BlockInputs, Heads, attend
from model.collectives import all_gather
from model.config import ModelConfig
from model.documents import PackedDocuments
from model.loss import IGNORED_LABEL
from model.parameters import parameter_specs
from model.rotary import rotate
from model.transformer import Block, Transformer
from pretrain.diagnostics.forward import measuring
from pretrain.diagnostics.weights import OwnWeights, projections
from pretrain.runtime.world import World


class Candidate(NamedTuple):
    """The weights of a head that may be added to a layer, fp32 [d_h, d]; its output projection is zero."""

    query: Tensor
    key: Tensor
    value: Tensor


def second_moments(engine: Any, batch: list[Tensor], world: World) -> list[Tensor]:
    """E[x xᵀ] by layer, fp32 [d, d]: x the normalised vectors that enter its attention, a mean over all
    ranks' tokens.

    Collective. *batch* is this rank's micro-batch, as Transformer.forward takes it.
    """
    sums: list[Tensor] = []
    counted = _not_padding(engine.module, batch)
    if counted is not None:
        counted = counted.to(world.device)
        tokens = counted.sum().double()
        if world.size > 1:  # the ranks of a tensor group count theirs again, as they do below
            dist.all_reduce(tokens)
        share = tokens.item() / world.size  # tokens of a rank, on the average

    def record(module: Any, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].detach().flatten(0, -2).float()  # [B T, d]; with sequence parallelism a part of T
        if counted is not None:
            rows = rows[counted]
        sums.append(rows.T @ rows / (len(rows) if counted is None else share))

    with measuring(engine) as (network, hooks), _without_head(engine), torch.no_grad():
        for layer in range(len(network.layers)):
            hooks.callback(_attention(network, layer).register_forward_pre_hook(record).remove)
        engine(*(tensor.to(world.device) for tensor in batch))
    if world.size > 1:
        for total in sums:  # a language model's ranks count equally many tokens
            dist.all_reduce(total)
    return [total / world.size for total in sums]


@contextmanager
def _without_head(engine: Any) -> Iterator[None]:
    """Leave head and loss out of forward passes: a fifth of a small model's check, and more with a large
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
    own = OwnWeights(engine, projections(config.num_layers), parameter_specs(config))
    return dict(own.full(world))


def gradient_norms(
    engine: Any, batch: list[Tensor], candidates: Mapping[int, Candidate], world: World
) -> dict[int, float]:
    """‖∂loss/∂W_o‖_F that a candidate head of each layer would get at once; its output projection is zero.
    Collective.

    In the manner of GradMax (arXiv 2201.05125): with the output projection at zero, nothing else of the head
    has a gradient, and this one is Σ_t g_t o_tᵀ with g_t the loss's gradient in the attention's output at
    position t and o_t the head's output there. Of the loss of *batch*, a mean over all ranks.
    """
    inputs: dict[int, tuple[Any, ...]] = {}
    outputs: dict[int, Tensor] = {}
    with measuring(engine) as (network, hooks), torch.enable_grad():
        for layer in candidates:
            attention = _attention(network, layer)

            def record(module: Any, given: tuple[Any, ...], output: Tensor, layer: int = layer) -> None:
                inputs[layer], outputs[layer] = given, output

            hooks.callback(attention.register_forward_hook(record).remove)
        loss = network(*(tensor.to(world.device) for tensor in batch))
        gradients = torch.autograd.grad(loss, [outputs[layer] for layer in candidates])
    norms = {}
    for layer, gradient in zip(candidates, gradients, strict=True):
        with torch.no_grad():
            head = _head_output(network, layer, inputs[layer], candidates[layer])
            if network.grid.sequence_parallel:
                gradient = _whole(gradient, network)
            weight = gradient.float().flatten(0, 1).T @ head.float().flatten(0, 1)  # [d, d_h]
        norms[layer] = torch.linalg.matrix_norm(world.sum(weight) / world.data_parallel).item()
    return norms


def _not_padding(network: Transformer, batch: list[Tensor]) -> Tensor | None:
    """Which positions of a classifier's micro-batch are of an example, bool [B T]; None where all are."""
    if network.config.classes is None:
        return None
    labelled = batch[1] != IGNORED_LABEL  # at an example's end; padding follows
    return (labelled.flip(1).cumsum(1).flip(1) > 0).flatten()


def _attention(network: Transformer, layer: int) -> Attention:
    return cast(Block, network.layers[layer]).attention


def _head_output(network: Transformer, layer: int, given: tuple[Any, ...], head: Candidate) -> Tensor:
    """The output [B, T, d_h] of a head on what an attention module was *given* (see Attention.forward)."""
    hidden, inputs = given[0], BlockInputs(*given[1:])
    attention, mask = _attention(network, layer), inputs.mask
    if network.grid.sequence_parallel:
        hidden = _whole(hidden, network)
    query, key, value = ((hidden @ weight.to(hidden).T)[:, :, None] for weight in head)  # [B, T, 1, d_h]
    if attention.q_norm is not None and attention.k_norm is not None:
        query, key = attention.q_norm(query), attention.k_norm(key)
    if inputs.table is not None:
        query, key = rotate(query, inputs.table), rotate(key, inputs.table)
    if inputs.offsets is not None:  # a kernel keeps packed documents apart; here a mask does
        documents = PackedDocuments(inputs.offsets, len(hidden), hidden.shape[1], hidden.dtype)
        mask = documents.mask(attention.window)
    return attend(Heads(query, key, value, mask), attention.scale, attention.window).flatten(2)


def _whole(hidden: Tensor, network: Transformer) -> Tensor:
    """[B, T / t, d] of all ranks of a tensor group -> [B, T, d]."""
    return all_gather(hidden, network.grid.tensor_group).transpose(0, 1).flatten(1, 2)
