"""Helpers for tests of tensor parallelism: the same model at t = 1 and on the ranks of a worker pool,
compared."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.initialization import initialize
from model.linears import shard_dim
from model.process_grid import ALONE, ProcessGrid, start_grid
from model.transformer import Transformer


def build(config: ModelConfig, dtype: torch.dtype, grid: ProcessGrid = ALONE, **options: Any) -> Transformer:
    """A model whose weights, norms and biases included, are drawn so large that every part of it matters."""
    model = Transformer(config, grid, **options).to(dtype)
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                whole = torch.empty(parameter.numel() * shards(model, parameter), dtype=torch.float64)
                whole.normal_(generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(own_part(model, parameter, whole).to(dtype))
    return model


def shards(model: Transformer, parameter: torch.nn.Parameter) -> int:
    """Into how many parts a parameter is cut."""
    return 1 if shard_dim(parameter) is None else model.grid.tensor_parallel


def own_part(model: Transformer, parameter: torch.nn.Parameter, whole: Tensor) -> Tensor:
    """What this rank holds of a whole tensor of that parameter (its gradient, say)."""
    dim = shard_dim(parameter)
    if dim is None:
        return whole
    return whole.chunk(model.grid.tensor_parallel, dim)[model.grid.tensor_rank]


def example(config: ModelConfig, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T]; some labels are not counted. A classifier has one label a sequence."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, ::5] = -100
    if config.classes is not None:
        labels = torch.full_like(labels, -100)
        for row in range(batch):
            labels[row, length - 1 - row] = row % config.classes
    return tokens[:, :-1].contiguous(), labels


@dataclass
class Whole:
    """What the unsplit model (t = 1, fp64) says."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def whole(config: ModelConfig, batch: int, length: int) -> Whole:
    """Logits, loss and every gradient of the unsplit model."""
    tokens, labels = example(config, batch, length)
    model = build(config, torch.float64)
    return whole_of(model, model(tokens), model(tokens, labels))


def whole_of(model: Transformer, logits: Tensor, loss: Tensor) -> Whole:
    """What an unsplit model says, given its logits and loss."""
    model.zero_grad()
    loss.backward()
    given = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    gradients = {name: gradient.clone() for name, gradient in given if gradient is not None}
    return Whole(logits.detach(), loss.detach(), gradients)


@functools.cache
def shared_grid(sequence_parallel: bool, context_parallel: int = 1) -> ProcessGrid:
    """The grid of the pool's ranks, t c = all of them, made once."""
    t = dist.get_world_size() // context_parallel
    return start_grid(t, sequence_parallel=sequence_parallel, context_parallel=context_parallel)


def compared(
    model: Transformer, expected: Whole, tokens: Tensor, labels: Tensor, offsets: Tensor | None = None
) -> dict[str, float]:
    """Largest differences of this rank's model from t = 1 in fp64, relative to the largest value.

    Keys: logits, loss, and every parameter's name for its gradient.

    Args:
        offsets: as Transformer.forward takes them.
    """
    model.zero_grad()
    found = model(tokens, labels, offsets)
    found.backward()
    with torch.no_grad():
        found_logits = model(tokens, None, offsets)
    result = {"logits": relative(found_logits, expected.logits), "loss": relative(found, expected.loss)}
    # Some gradients are zero but for rounding (a bias on the keys moves all logits of a query alike).
    floor = 1e-3 * max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, parameter in model.named_parameters():
        gradient = expected.gradients[name]
        assert parameter.grad is not None, name
        if model.grid.context_parallel > 1:  # averaged over the ranks, as training does
            dist.all_reduce(parameter.grad, group=model.grid.context_group)
            parameter.grad /= model.grid.context_parallel
        if shard_dim(parameter) == 0 and name in ("token_embedding.weight", "output.weight"):
            rows = model.config.padded_vocab_size(model.grid.tensor_parallel)  # t = 3 pads to more rows
            gradient = torch.nn.functional.pad(gradient, (0, 0, 0, rows - gradient.shape[0]))
        scale = gradient.abs().max().clamp(min=floor)
        result[name] = relative(parameter.grad, own_part(model, parameter, gradient), scale)
    assert set(expected.gradients) == {name for name, _ in model.named_parameters()}
    return result


def many_differences(cases: list[tuple[ModelConfig, int, int, dict[str, Any]]]) -> list[dict[str, float]]:
    """compared() for several cases; the ranks share out the unsplit models among them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    result = []
    for chunk in (cases[start : start + world] for start in range(0, len(cases), world)):
        expected: list[Any] = [None] * world
        dist.all_gather_object(expected, whole(*chunk[rank][:3]) if rank < len(chunk) else None)
        for (config, batch, length, options), unsplit in zip(chunk, expected, strict=False):
            given = dict(options)
            grid = shared_grid(given.pop("sequence_parallel", False), given.pop("context_parallel", 1))
            model = build(config, torch.float64, grid, **given)
            result.append(compared(model, unsplit, *example(config, batch, length)))
    return result


def relative(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Largest difference, relative to the largest magnitude of *scale* (*expected* when not given)."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    largest = (expected if scale is None else scale).abs().max().item() or 1.0
    return ((found - expected).abs().max() / largest).item() if found.numel() else 0.0


def scaled_down(config: ModelConfig, tensor_parallel: int) -> ModelConfig:
    """The same schedule and switches at a size for tests: repeated layers once, the smallest widths that t
    divides, the same in all layers."""
    kinds = [_kind(config, layer) for layer in range(config.num_layers)]
    layers = [layer for layer, kind in enumerate(kinds) if layer == 0 or kind != kinds[layer - 1]][:4]
    heads = tuple(config.heads[layer] for layer in layers)
    d_model = math.lcm(*heads, tensor_parallel)
    if config.positions == "rope" or d_model == max(heads):
        d_model = math.lcm(2 * math.lcm(*heads), tensor_parallel)  # even head dims
    windows = None
    if config.local_window is not None:
        windows = tuple(None if config.local_window[layer] is None else 5 for layer in layers)
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "context_length": 24,
        "d_model": d_model,
        "ffn_width": 4 * tensor_parallel,
    }
    head_dim = None
    if config.head_dim is not None:
        sizes["d_model"], head_dim = 8 * tensor_parallel, (2 * tensor_parallel,) * len(heads)
    sizes |= {"heads": heads, "kv_heads": None, "head_dim": head_dim, "block_width": None}
    return config.replace(**sizes, local_window=windows)


def _kind(config: ModelConfig, layer: int) -> tuple[int, int, int | None]:
    return config.heads[layer], config.layer_kv_heads(layer), config.layer_window(layer)


class Sent:
    """Counts what this rank sends through torch.distributed, by collective, while it is entered.

    Bytes of a ring: an all-reduce of n bytes sends 2 n (r-1)/r, an all-to-all n (r-1)/r, an all-gather its
    input to r-1 others.
    """

    def __init__(self) -> None:
        self.bytes = {"all_reduce": 0.0, "all_to_all_single": 0.0, "all_gather_into_tensor": 0.0}

    def __enter__(self) -> Sent:
        self._originals = {name: getattr(dist, name) for name in self.bytes}
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, group: Any = None, **options: Any) -> Any:
            ranks = dist.get_world_size(group)
            given = tensors[min(1, len(tensors) - 1)]
            size = given.numel() * given.element_size()
            factor = {"all_reduce": 2 / ranks, "all_to_all_single": 1 / ranks}.get(name, 1) * (ranks - 1)
            if len(tensors) == 4:  # unequal parts, by receiver
                factor = 1 - tensors[3][group.rank()] / max(1, sum(tensors[3]))
            self.bytes[name] += size * factor
            return original(*tensors, group=group, **options)

        return call
