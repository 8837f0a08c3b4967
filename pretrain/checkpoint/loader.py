"""Loads a checkpoint into an engine, bit-identically, whatever engine wrote it.

Data-parallel and tensor-parallel ranks, ZeRO stage, offloading, dtype and optimizer groups may differ. Every
rank reads its own pieces of the parameters straight from the checkpoint's files and writes them into its
optimizer's flat tensors. So there is no converted copy on disk to wait for, to interrupt or to clean up, and
no collective that could time out while a rank reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.parameters import ParameterSpec
from pretrain.checkpoint.index import MASTERS, RESTORED, TENSORS_FOLDER, rank_file
from pretrain.checkpoint.random_state import restore_random_state
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.state import explain_damage
from pretrain.engine.layout import (
    changing_masters,
    engine_flats,
    inner_optimizer,
    set_counters,
    shard_shapes,
    tensor_place,
)
from pretrain.optim.muon import name_moments
from pretrain.runtime.world import World
from pretrain.utils.format import ProgressLine

Open = Callable[[Path], UnshardedCheckpoint]


def load_checkpoint(
    engine: Any,
    folder: Path,
    world: World,
    opened: Open = UnshardedCheckpoint.open,
    weights_only: bool = False,
) -> None:
    """Set weights, moments and step counts, and the groups' hyperparameters of *engine*, and this rank's
    random state if as many ranks have written the checkpoint. Collective.

    Args:
        engine: a DeepSpeed engine of any shape, built for the checkpoint's model, trained or not.
        folder: the checkpoint to load; every rank opens it for itself.
        opened: opens *folder*, perhaps as another model than it holds (see pretrain/growth/edit.py).
        weights_only: leave the optimizer in its initial state.

    Raises:
        UserError: on every rank, when the checkpoint cannot be read or does not fit the engine. Weights may
            have been changed then.
    """
    with changing_masters(engine), ProgressLine("loading", "parameter") as progress:
        shown = progress if world.is_main else None

        def restore() -> UnshardedCheckpoint:
            checkpoint = opened(folder)
            _restore(engine, checkpoint, shown, weights_only)
            if checkpoint.state.world and checkpoint.state.world.ranks == world.size:
                with explain_damage(folder / TENSORS_FOLDER / rank_file(world.rank)):
                    restore_random_state(checkpoint.random_state(world.rank))
            checkpoint.release()
            return checkpoint

        state = world.on_all_ranks(restore).state
    set_counters(engine, state.step, state.skipped, state.sequences)


def check_readable(folder: Path, world: World, opened: Open = UnshardedCheckpoint.open) -> None:
    """Check the sizes of what an engine of any shape will read, before anything is built. Collective.

    Raises:
        UserError: on every rank, when files are missing, cut short or do not fit the model that the
            checkpoint describes.
    """
    world.on_all_ranks(lambda: opened(folder).check(world.rank, world.size))


def _restore(
    engine: Any, checkpoint: UnshardedCheckpoint, progress: ProgressLine | None, weights_only: bool
) -> None:
    """The part of load_checkpoint that needs no other rank."""
    count, rank = tensor_place(engine)
    shapes = shard_shapes(engine)
    adam = inner_optimizer(engine)
    done = itertools.count(1)
    for flat in engine_flats(engine):
        held = adam.state.pop(flat.master, {})
        moments: dict[str, Tensor] = {}
        for moment in () if weights_only else name_moments(flat.group):
            moments[moment] = held[moment] if moment in held else torch.zeros_like(flat.master.data)
        targets = {MASTERS: flat.master.data} | moments
        step = checkpoint.step(next(iter(flat.pieces)))  # ZeRO counts those of all its parameters together
        for name, pieces in flat.pieces.items():
            for key, target in targets.items() if pieces else ():
                places = [(p.start, target[p.offset : p.offset + p.numel]) for p in pieces]
                if checkpoint.holds_shard(name, count):
                    for start, place in places:
                        checkpoint.read_shard(name, key, rank, start, place)
                    continue
                full = checkpoint.tensor(name, key)
                elements = take_shard(full, checkpoint.specs[name], count, rank, shapes[name]).flatten()
                for start, place in places:
                    place.copy_(elements[start : start + place.numel()])
            if progress:
                progress(next(done), len(checkpoint.specs))
        if weights_only:
            continue
        adam.state[flat.master] = {"step": _step_like(adam, flat.master, step), **moments}
        # The groups may be others (with other learning-rate rules): moments belong to parameters, and a group
        # that the checkpoint does not have keeps the run's own settings.
        saved_group = checkpoint.groups.get(flat.group["name"])
        if saved_group:
            flat.group.update({key: saved_group.settings[key] for key in RESTORED})


def _step_like(adam: Any, master: Tensor, step: int) -> Any:
    """A step count as this optimizer keeps it: torch's Adam in a tensor, DeepSpeed's in an int."""
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        on_device = adam.defaults.get("fused") or adam.defaults.get("capturable")
        return torch.tensor(float(step), device=master.device if on_device else "cpu")
    return step


def take_shard(full: Tensor, spec: ParameterSpec, count: int, rank: int, shape: tuple[int, ...]) -> Tensor:
    """The part of a full tensor that tensor-parallel rank *rank* of *count* holds, of the given *shape*."""
    if spec.vocabulary:  # padded to a multiple that depends on the number of ranks, with zeros
        rows = shape[0] * count
        full = F.pad(full, (0, 0, 0, rows - full.shape[0])) if rows > full.shape[0] else full
    if spec.shard_dimension is None or count == 1:
        return full
    length = full.shape[spec.shard_dimension] // count
    return full.narrow(spec.shard_dimension, rank * length, length)
