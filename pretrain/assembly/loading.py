"""Finds where a run stands, and loads what its last session has saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError
from pretrain.checkpoint.loader import check_readable, load_checkpoint
from pretrain.checkpoint.state import TrainingState, WorldRecord, read_features
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import RunConfig
from pretrain.data.tokenizer import Tokenizer
from pretrain.growth.edit import note_changed, open_changed
from pretrain.run.data import RunData
from pretrain.run.decisions import Decisions
from pretrain.run.hooks import Hook
from pretrain.run.resume import (
    BEGIN_ANOTHER,
    check_imported,
    check_resume,
    is_imported,
    resets_optimizer,
)
from pretrain.runtime.environment import is_requeued
from pretrain.runtime.version_check import code_hash
from pretrain.runtime.world import World


@dataclass(frozen=True)
class Found:
    """Where a run stands: its newest valid checkpoint."""

    folder: Path | None
    """None: the run begins."""
    state: TrainingState
    notes: list[str]
    """Notes for the user about it, one per line."""
    begin: Callable[[], Path] | None = None
    """See Loading."""


def find_newest(run: RunConfig, store: CheckpointStore) -> Found:
    """The newest valid checkpoint of a run, fetched from its mirror if its folder is lost. Collective.

    Raises:
        UserError: there are checkpoints, but none is valid, or ``resume: never`` was given; settings of an
            import that has none.
    """
    store.restore_checkpoints()
    fetched: list[str] = []
    # Of rank 0: launchers do not pass SLURM's variables to other nodes.
    continues = run.resume == "auto" or store.world.broadcast(is_requeued())
    mirror = run.checkpoint.mirror or ""
    if continues and mirror:
        from pretrain.mirror.copies import repair_checkpoint, restore_lost

        fetched = store.world.on_rank_zero(
            lambda: [] if store.steps() else restore_lost(mirror, run.folder, run=run)
        )
        newest = store.newest_valid(lambda folder: repair_checkpoint(mirror, folder))
    else:
        if mirror:
            from pretrain.mirror.copies import refuse_copy

            store.world.on_rank_zero(lambda: None if store.steps() else refuse_copy(mirror, run.folder))
        newest = store.newest_valid()
    folder, saved, damaged = newest or (None, TrainingState(), [])
    if folder is None:
        check_imported(run)
        return Found(None, saved, [])
    if not continues:
        other = BEGIN_ANOTHER if is_imported(saved) else "give --name for a new run"
        raise UserError(
            f"resume: {run.folder} already holds a checkpoint ({folder.name}); {other}, or --resume auto to "
            "continue it"
        )
    return Found(folder, saved, [f"{line}; continuing from {folder.name}" for line in damaged] + fetched)


def next_state(
    saved: TrainingState, run: RunConfig, decisions: Decisions, data: RunData, world: World
) -> TrainingState:
    """The state of a session that continues from a checkpoint's."""
    state = dataclasses.replace(
        saved,
        skipped_in_a_row=0,  # settings may have changed, so a run that had stopped learning gets a new chance
        run=run.to_dict(),
        decided=decisions.to_record(),
        model=decisions.model.value.to_json(),
        data=data.identity(),
        world=_world_record(world, decisions, saved),
    )
    if saved.model and not saved.run:
        state.from_seed, state.imported = False, True  # a model that was made elsewhere
    return state


def _world_record(world: World, decisions: Decisions, saved: TrainingState) -> WorldRecord:
    """What a checkpoint's files, and the bits of its numbers, depend on; every code that took part."""
    zero = decisions.ds_config.value["zero_optimization"]
    code, now = saved.world.code if saved.world else [], code_hash()
    return WorldRecord(
        **world.record(),
        threads=decisions.threads.value,
        stage=zero["stage"],
        dtype=decisions.dtype.value,
        code=code if code[-1:] == [now] else [*code, now],
        offload=(zero.get("offload_optimizer") or {}).get("device", "none"),
    )


@dataclass(frozen=True)
class Loading:
    """How a session loads the checkpoint that it continues from."""

    folder: Path | None
    """The checkpoint; None for a run that begins now."""
    weights_only: bool = False
    """Whether the optimizer's state is reset: it is of another kind."""
    begin: Callable[[], Path] | None = None
    """Writes the checkpoint of step 0 of a run that begins with other weights than its seed's. Collective."""
    notes: tuple[str, ...] = ()
    """What has changed, a line each."""

    def load(self, engine: Any, world: World, state: TrainingState, hooks: Sequence[Hook]) -> None:
        """Set the engine and the hooks as the last session left them. Collective.

        Raises:
            UserError: the checkpoint's files cannot be read.
        """
        folder = self.folder if self.begin is None else self.begin()
        if folder is not None:
            load_checkpoint(engine, folder, world, open_changed, self.weights_only)
            note_changed(state)
            tensors = read_features(folder)
            for hook in hooks:
                hook.restore(tensors)
        engine.train()


def plan_loading(
    newest: Found,
    state: TrainingState,
    run: RunConfig,
    held: ModelConfig,
    tokenizer: Tokenizer,
    world: World,
) -> Loading:
    """Check that a session may continue from a checkpoint, and plan how. Collective.

    Args:
        state: what next_state returned.
        held: the model that the checkpoint must hold.
        tokenizer: the run's.

    Raises:
        UserError: as check_resume, resets_optimizer and check_readable.
    """
    folder, saved = newest.folder, newest.state
    if folder is None:
        return Loading(None, notes=tuple(newest.notes), begin=newest.begin)
    notes = [*newest.notes, *check_resume(saved, state, run, held, (folder / "tokenizer", tokenizer))]
    check_readable(folder, world, open_changed)
    return Loading(folder, resets_optimizer(saved, run), notes=tuple(notes))
