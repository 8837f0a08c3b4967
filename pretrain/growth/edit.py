"""Turns a checkpoint into one with other heads: the weights and Adam's state of all other heads stay
bit-identical.

A new head is appended to its layer; its output projection is zero, so that the network computes what it did
before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.initialization import initial_distribution
from model.parameters import ParameterRole, parameter_specs
from pretrain.checkpoint.index import MASTERS
from pretrain.checkpoint.sharded_files import ParameterGroup, UnshardedCheckpoint
from pretrain.checkpoint.state import TrainingState, read_features
from pretrain.growth.measure import Candidate
from pretrain.growth.record import NAME, Change, GrowthState

NOISE = 0.1
"""Share of a usual initial weight that is added to a head along its directions. Without it all of the head's
dimensions would be multiples of each other, and without rotary positions would stay so."""


def pending_changes(state: TrainingState) -> list[Change]:
    """The changes that were decided at a checkpoint's step, and are made before the next."""
    growth = GrowthState.from_state(state)
    return growth.pending if growth else []


def apply_changes(model: ModelConfig, changes: Sequence[Change]) -> ModelConfig:
    """The model after *changes*. Raises UserError for one that the model has no place for."""
    if not changes:
        return model
    heads = list(model.heads)
    for change in changes:
        count = heads[change.layer] if 0 <= change.layer < len(heads) else 0
        valid = change.head == count if change.kind == "grow" else 0 <= change.head < count > 1
        if not count or not valid:
            raise UserError(
                f"checkpoint: growth.pending would {change.kind} head {change.head} of layer {change.layer}, "
                "which the model does not have"
            )
        heads[change.layer] += 1 if change.kind == "grow" else -1
    return model.replace(heads=tuple(heads))


def candidate(
    model: ModelConfig, seed: int, step: int, change: Change, directions: Tensor | None
) -> Candidate:
    """The weights of a new head; a function of its arguments, on the CPU.

    Args:
        model: the model that it is added to.
        seed: of the run.
        step: at which it is added.
        change: its layer and index.
        directions: fp32 [2, d], unit vectors that q and k lie along, with the usual length of a row; or None,
            and both are drawn as at step 0. v always is.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{change.layer}/{change.head}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    head_dim, d = model.layer_head_dim(change.layer), model.layer_width(change.layer)

    def draw(part: str) -> tuple[Tensor, float]:
        """The head's rows of a part, as at step 0, and the standard deviation of their entries."""
        name = f"layers.{change.layer}.attention.{part}.weight"
        spec = parameter_specs(model)[name]
        mean, std, _ = initial_distribution(name, spec.role, spec.shape, model)
        return torch.empty(head_dim, d).normal_(mean, std, generator=generator), std

    (query, query_std), (key, key_std), (value, _) = map(draw, "qkv")
    if directions is not None:
        # The same factors in q and in k: every dimension of the head adds to W_Q W_Kᵀ with the same sign.
        factors = torch.empty(head_dim, 1).normal_(generator=generator)
        along_query, along_key = directions
        query = query_std * d**0.5 * factors * along_query + NOISE * query
        key = key_std * d**0.5 * factors * along_key + NOISE * key
    return Candidate(query, key, value)


def open_changed(folder: Path) -> UnshardedCheckpoint:
    """Open a checkpoint as a run continues from it: after its pending changes. Raises as
    UnshardedCheckpoint.open and apply_pending_changes."""
    return apply_pending_changes(UnshardedCheckpoint.open(folder))


def note_changed(state: TrainingState) -> None:
    """Note that an engine holds the pending changes: none is left, and the seed alone does not give its
    weights."""
    if state.record(NAME).get("pending"):
        state.record(NAME)["pending"] = []
        state.from_seed = False


def apply_pending_changes(checkpoint: UnshardedCheckpoint) -> UnshardedCheckpoint:
    """The checkpoint after its pending changes, or itself if there are none. Nothing is read yet.

    Raises:
        UserError: the changes do not fit the model, or directions of a new head are missing.
    """
    changes = pending_changes(checkpoint.state)
    if not changes:
        return checkpoint
    model = ModelConfig.from_json(checkpoint.state.model)
    after = apply_changes(model, changes)
    source = _ChangedSource(checkpoint, model, changes)
    return UnshardedCheckpoint(checkpoint.folder, checkpoint.state, source, parameter_specs(after))


class _ChangedSource:
    """A checkpoint's tensors with heads added and removed (a Source)."""

    def __init__(
        self, checkpoint: UnshardedCheckpoint, model: ModelConfig, changes: Sequence[Change]
    ) -> None:
        self._checkpoint, self._model, self._changes = checkpoint, model, changes
        self.groups: dict[str, ParameterGroup] = checkpoint.groups
        self.names, self.step, self.release = checkpoint.names, checkpoint.step, checkpoint.release
        self.check, self.random_state = checkpoint.check, checkpoint.random_state
        state, features = checkpoint.state, read_features(checkpoint.folder)
        self._new: dict[Change, Candidate] = {}
        for change in (change for change in changes if change.kind == "grow"):
            directions = features.get(change.directions)
            if directions is not None and directions.shape != (2, model.layer_width(change.layer)):
                raise UserError(f"checkpoint: {change.directions} has shape {list(directions.shape)}")
            self._new[change] = candidate(model, state.run.get("seed", 0), state.step, change, directions)

    def tensor(self, name: str, key: str) -> Tensor:
        tensor, role, changes = self._checkpoint.tensor(name, key), *self._find_changes(name)
        if not changes:
            return tensor
        assert role.layer is not None
        dimension = 1 if role.part == "o" else 0
        rows = 1 if role.part == "head_gate" else self._model.layer_head_dim(role.layer)
        heads = list(tensor.split(rows, dimension))
        for change in changes:
            if change.kind == "prune":
                del heads[change.head]
            else:
                heads.append(self._head(change, role, key, heads[0]))
        return torch.cat(heads, dimension)

    def holds_shard(self, name: str, count: int) -> bool:
        return not self._find_changes(name)[1] and self._checkpoint.holds_shard(name, count)

    def read_shard(self, name: str, key: str, shard: int, start: int, out: Tensor) -> None:
        self._checkpoint.read_shard(name, key, shard, start, out)

    def _find_changes(self, name: str) -> tuple[ParameterRole, list[Change]]:
        """The role of a parameter, and the changes of its heads."""
        role = self._checkpoint.specs[name].role
        changes = [change for change in self._changes if change.layer == role.layer]
        return role, changes if has_heads(role) else []

    def _head(self, change: Change, role: ParameterRole, key: str, like: Tensor) -> Tensor:
        """The new head's part of a weight or bias; its moments begin at zero, as do biases, the output's, and
        the gates', which are then a half."""
        if key == MASTERS and role.kind == "matrix" and role.part in ("q", "k", "v"):
            return self._new[change]["qkv".index(role.part)].to(like.dtype)
        return torch.zeros_like(like)


def has_heads(role: ParameterRole) -> bool:
    """Whether a parameter has a part for every head: q, k and v with their biases, gates, and the weight of
    o."""
    return role.part in ("q", "k", "v", "gate", "head_gate") or (role.part == "o" and role.kind == "matrix")
