"""The role of every parameter, decided by the module that owns it, its shape, and how it is sharded.

The role never comes from the shape: under ZeRO-3 every parameter is flat, so "decay what has two dimensions"
would decay nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from model.attention import Attention
from model.config import ModelConfig
from model.feedforward import FeedForward
from model.norms import Norm
from model.transformer import Transformer

Kind = Literal["matrix", "bias", "norm", "embedding"]
Part = Literal["q", "k", "v", "o", "gate", "head_gate", "ffn", "norm", "embedding", "output"]
_PROJECTIONS: tuple[Part, ...] = ("q", "k", "v", "o", "gate", "head_gate")
_KINDS: dict[Part, Kind] = {"norm": "norm", "embedding": "embedding"}


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter."""

    kind: Kind
    """matrix (weight of a linear layer), bias (of a linear layer or norm), norm (its weight) or embedding."""
    part: Part
    """The piece of the network it belongs to; output is an untied head or a classifier's, embedding tokens or
    positions."""
    layer: int | None
    """0-based layer, None outside the layers."""


@dataclass(frozen=True)
class ParameterSpec:
    """Role, shape and sharding that a model expects of one parameter."""

    role: ParameterRole
    shape: tuple[int, ...]
    """The full shape, with the vocabulary padded as for one tensor-parallel rank."""
    shard_dimension: int | None
    """The dimension that tensor parallelism cuts; None: every rank has all of it."""
    vocabulary: bool
    """Whether dimension 0 is the padded vocabulary, whose number of zero rows at the end depends on the
    tensor-parallel degree."""

    @property
    def numel(self) -> int:
        """Number of elements, full shape."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=64)
def parameter_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Specs of all parameters of a model by name, in the model's order, not to be changed. No memory is
    allocated for them."""
    with torch.device("meta"):
        model = Transformer(config)
    roles = parameter_roles(model)
    return {
        name: ParameterSpec(
            roles[name],
            tuple(parameter.shape),
            shard_dimension(name, roles[name]),
            has_vocabulary_rows(name),
        )
        for name, parameter in model.named_parameters()
    }


def parameter_roles(model: Transformer) -> dict[str, ParameterRole]:
    """The role of every parameter by its name, in the order of named_parameters.

    Raises TypeError for a parameter whose module is of an unknown type: a new layer type must be added here.
    """
    parts: dict[nn.Module, Part] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            found = ((getattr(module, part), part) for part in _PROJECTIONS)
            parts.update({projection: part for projection, part in found if projection is not None})
        elif isinstance(module, FeedForward):
            parts.update(dict.fromkeys(module.children(), "ffn"))
        elif isinstance(module, Norm):
            parts[module] = "norm"
    parts[model.token_embedding] = "embedding"
    if model.position_embedding is not None:
        parts[model.position_embedding] = "embedding"
    for head in (model.output, model.classifier):
        if head is not None:
            parts[head] = "output"
    layers = {child: layer for layer, block in enumerate(model.layers) for child in block.modules()}

    owners = {
        (f"{prefix}.{name}" if prefix else name): (module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    roles = {}
    for name, _ in model.named_parameters():
        module, local_name = owners[name]
        if module not in parts:
            raise TypeError(f"{name}: a {type(module).__name__} has no known role")
        part = parts[module]
        kind: Kind = "bias" if local_name == "bias" else _KINDS.get(part, "matrix")
        roles[name] = ParameterRole(kind, part, layers.get(module))
    return roles


def shard_dimension(name: str, role: ParameterRole) -> int | None:
    """The dimension that tensor parallelism cuts into equal contiguous parts; None: every rank has all of it.

    Outputs of q, k, v, gate, up and of an untied head (with their biases), of the gates of attention's
    elements, and the rows of the token embedding, are cut along dimension 0; inputs of o and down along
    dimension 1 (their biases are added once, after the sum). A classifier's head, and the gates of heads, are
    whole everywhere.
    """
    outside = ("position_embedding.", "classifier.")
    if role.kind == "norm" or role.part in ("norm", "head_gate") or name.startswith(outside):
        return None
    if role.part == "o" or ".ffn.down." in name:
        return 1 if role.kind == "matrix" else None
    return 0


def is_hidden(role: ParameterRole) -> bool:
    """Whether a parameter is a matrix of the blocks, whose initial spread and rate depend on the width with
    parametrization mup."""
    return role.kind == "matrix" and role.layer is not None


def takes_muon(role: ParameterRole) -> bool:
    """Whether a run with Muon updates a parameter with it: all matrices of the blocks except the gates of
    heads (one row per head), which AdamW updates."""
    return is_hidden(role) and role.part != "head_gate"


def has_vocabulary_rows(name: str) -> bool:
    """Whether a parameter has one row per (padded) vocabulary entry: the token embedding, and an untied
    head."""
    return name in ("token_embedding.weight", "output.weight")
