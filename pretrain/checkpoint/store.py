"""Writes checkpoints atomically, verifies them before they are loaded, and prunes old ones.

A checkpoint is a folder ``checkpoints/step_000500`` that holds ``weights_and_optimizer/`` (a file of each
rank and the index, see index.py), ``tokenizer/``, ``state.json`` (TrainingState), ``manifest.json`` (size and
hash of every file), and in runs that probe their features ``features.safetensors`` (those of the last probe).
It is written under a hidden name, synced, and renamed when every rank has finished; ``latest`` is then
replaced in one step.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.errors import MachineError, UserError
from model.parameters import parameter_specs
from pretrain.checkpoint.finder import checkpoint_path, checkpoint_steps, claim, newest_valid
from pretrain.checkpoint.index import INDEX, TENSORS_FOLDER, rank_file
from pretrain.checkpoint.manifest import verify, write_manifest
from pretrain.checkpoint.random_state import random_state
from pretrain.checkpoint.state import FEATURES, TrainingState, read_state
from pretrain.checkpoint.writer import RankWriter, engine_index, engine_tensors
from pretrain.config.sections import CheckpointConfig
from pretrain.runtime.world import World
from pretrain.utils.files import (
    copy_folder,
    file_entry,
    put_folder,
    restore_folder,
    sync,
    sync_tree,
    write_atomically,
)

MayPrune = Callable[[Path], bool]
"""Whether a checkpoint that the configuration does not keep may be deleted now."""


def always(folder: Path) -> bool:
    """Any may."""
    return True


class _UnderWay(NamedTuple):
    """A checkpoint that is being written."""

    writer: RankWriter
    partial: Path
    target: Path
    state: str
    index_text: str | None
    step: int
    features: dict[str, Tensor]


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        run_folder: the run's folder.
        config: what to keep.
        world: the ranks that save and load together; those that begin, finish, check or find
            a checkpoint are collective.
    """

    def __init__(self, run_folder: Path, config: CheckpointConfig, world: World) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / "checkpoints"
        self.config = config
        self.world = world
        self._under_way: _UnderWay | None = None
        self._pruning: threading.Thread | None = None
        self._prune_problem: str | None = None

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, ascending."""
        return checkpoint_steps(self.run_folder)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of *step*."""
        return checkpoint_path(self.run_folder, step)

    def close(self) -> None:
        """Give up the checkpoint that is under way, if one is. Not collective."""
        if self._under_way is not None:
            checkpoint, self._under_way = self._under_way, None
            checkpoint.writer.give_up()
            if self.world.is_main:
                shutil.rmtree(checkpoint.partial, ignore_errors=True)

    def begin(
        self,
        engine: Any,
        state: TrainingState,
        tokenizer_folder: Path,
        features: dict[str, Tensor] | None = None,
        background: bool = True,
    ) -> None:
        """Start to write a checkpoint, after the one before; ``finish`` makes it valid.

        Args:
            features: of the last probes, to compare the next with; equal on all ranks (see
                ``read_features``).
            background: return as soon as the tensors are copied to the host's memory, and write them during
                training.

        Raises:
            UserError: on every rank alike, when any rank could not write; older checkpoints are untouched.
        """
        self.finish()
        target = self.path(state.step)
        partial = self.folder / f".writing_{target.name}"
        self._stop_on(self._prepare(partial, tokenizer_folder) if self.world.is_main else None, partial)
        path = partial / TENSORS_FOLDER / rank_file(self.world.rank)
        writer = RankWriter(path, engine_tensors(engine) | random_state(), background)
        index = None
        if self.world.is_main:
            index = engine_index(engine, parameter_specs(ModelConfig.from_json(state.model))).to_json()
        written_state = state.to_json()
        self._under_way = _UnderWay(
            writer, partial, target, written_state, index, state.step, dict(features or {})
        )

    @property
    def writing(self) -> bool:
        """Whether this rank's thread is still writing."""
        return self._under_way is not None and self._under_way.writer.running

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun and not yet finished. The same on all ranks."""
        return self._under_way is not None

    def finish(self) -> int | None:
        """Wait until every rank has written its files, and put the checkpoint in its place.

        Returns:
            The checkpoint's step; None if none was under way.

        Raises:
            UserError: as begin.
        """
        if self._under_way is None:
            return None
        checkpoint, self._under_way = self._under_way, None
        checkpoint.writer.wait()
        partial = checkpoint.partial
        self._stop_on(checkpoint.writer.problem, partial)
        written = self.world.gather(checkpoint.writer.written)
        problem = self._finish(checkpoint, written) if self.world.is_main else None
        self._stop_on(problem, partial)
        return checkpoint.step

    def start_pruning(self, newest: int, may_prune: MayPrune = always) -> None:
        """Begin to delete checkpoints that the configuration does not keep, now that *newest* is the newest
        step of the run's curve. Training does not wait: a large one takes seconds. On rank 0.

        Args:
            may_prune: asked for each folder, from a thread.
        """
        if self.world.is_main:
            self._pruning = threading.Thread(
                target=self._prune_or_note, args=(newest, may_prune), name="old checkpoints", daemon=True
            )
            self._pruning.start()

    def end_pruning(self) -> str | None:
        """Wait until older checkpoints are deleted; why one could not be, if so. Not collective."""
        if self._pruning is not None:
            self._pruning.join()
        problem, self._pruning, self._prune_problem = self._prune_problem, None, None
        return problem

    def check_data(self, problem: str | None) -> None:
        """Raise UserError on every rank if one has a *problem* with the data; what is being written is
        removed."""
        if self._under_way is not None:
            self._under_way.writer.wait()
        self._stop_on(problem, self._under_way and self._under_way.partial, "data")

    def newest_valid(
        self, repair: Callable[[Path], bool] = lambda folder: False
    ) -> tuple[Path, TrainingState, list[str]] | None:
        """Find the newest checkpoint whose files all have the size and hash they were written with.

        Args:
            repair: is given each one that does not, on rank 0; whether it was replaced by a copy.

        Returns:
            Its folder, its state and a line about each that was passed over or replaced; or None.

        Raises:
            UserError: there are checkpoints, but none is valid.
            MachineError: one cannot be read now. It is not passed over: the run would leave its curve, and
                delete it.
        """
        notes: list[str] = []

        def problem_of(folder: Path) -> str | None:
            problem = self._compare(folder)
            if problem and self.world.on_rank_zero(lambda: repair(folder)):
                notes.append(f"checkpoint {folder.name} was damaged ({problem}); it was fetched again")
                problem = self._compare(folder)
            return problem

        folder = newest_valid(
            self.run_folder,
            self.world.broadcast(self.steps()),
            problem_of,
            lambda folder, problem: notes.append(f"checkpoint {folder.name} is damaged ({problem})"),
        )
        if folder is not None:
            return folder, read_state(folder), notes
        if notes:
            mirrored = self.config.mirror is not None
            other = "give another --name" if mirrored else "move the folder elsewhere"
            raise UserError(
                f"checkpoints: no valid one in {self.folder}: {'; '.join(notes)}; restore one, or {other} to "
                "start over"
            )
        return None

    def _compare(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, of which each rank reads its part. Collective."""
        try:
            problem = self.world.on_all_ranks(lambda: verify(folder, self.world.rank, self.world.size))
        except MachineError as error:
            raise MachineError(
                f"checkpoints: {error}; try again when it can be read, or move {folder.name} elsewhere to "
                "continue from an earlier one"
            ) from None
        return self.world.first_problem(problem)

    def _prepare(self, partial: Path, tokenizer_folder: Path) -> str | None:
        if problem := self.end_pruning():
            return problem
        try:
            self.restore_checkpoints()
            for leftover in self.folder.glob(".*_step_*"):  # of sessions that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            (partial / TENSORS_FOLDER).mkdir(parents=True)
            copy_folder(tokenizer_folder, partial / "tokenizer")
        except OSError as error:
            return f"cannot write {error.filename or partial}: {error.strerror or error}"
        return None

    def restore_checkpoints(self) -> None:
        """Put back, on rank 0, the checkpoints of which a session was killed while it replaced them. Not
        collective."""
        for replaced in self.folder.glob(".replaced_step_*") if self.world.is_main else ():
            restore_folder(self.folder / replaced.name.removeprefix(".replaced_"))

    def _finish(self, checkpoint: _UnderWay, written: list[dict[str, Any]]) -> str | None:
        """Rank 0: add state and manifest, sync, rename, point ``latest`` at the result."""
        partial, target = checkpoint.partial, checkpoint.target
        try:
            write_atomically(partial / "state.json", checkpoint.state)
            if checkpoint.features:
                save_file(checkpoint.features, partial / FEATURES)
                sync(partial / FEATURES)
            index = partial / TENSORS_FOLDER / INDEX
            write_atomically(index, checkpoint.index_text or "")
            files = {f"{TENSORS_FOLDER}/{name}": entry for part in written for name, entry in part.items()}
            for path in sorted([index, *partial.glob("*"), *(partial / "tokenizer").rglob("*")]):
                if path.is_file():
                    files[path.relative_to(partial).as_posix()] = file_entry(path)
            write_manifest(partial, files)
            sync_tree(partial / "tokenizer")
            sync(partial / TENSORS_FOLDER)  # every rank has synced its own files in there
            sync(partial)
            put_folder(partial, target)  # it may exist: damaged, or written before a fall-back
            write_atomically(self.run_folder / "latest", target.name + "\n")
        except (OSError, SafetensorError) as error:
            name = getattr(error, "filename", None) or partial
            return f"cannot write {name}: {getattr(error, 'strerror', None) or error}"
        return None

    def _stop_on(self, problem: str | None, partial: Path | None, section: str = "checkpoint") -> None:
        problem = self.world.first_problem(problem)
        if problem is None:
            return
        if self.world.is_main and partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        steps = self.steps()
        remaining = f"the checkpoint of step {steps[-1]} stays" if steps else "there is no earlier checkpoint"
        raise UserError(f"{section}: {problem}; {remaining} in {self.folder}")

    def _prune_or_note(self, newest: int, may_prune: MayPrune = always) -> None:
        try:
            self._prune(newest, may_prune)
        except OSError as error:
            self._prune_problem = f"cannot delete {error.filename}: {error.strerror or error}"

    def _prune(self, newest: int, may_prune: MayPrune = always) -> None:
        # Steps beyond the newest belong to a curve this run has left (it fell back to an older checkpoint).
        steps = [step for step in self.steps() if step <= newest]
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            keep |= {step for step in steps if step % self.config.keep_every == 0}
        for step in self.steps():
            if step in keep:
                continue
            if step in steps and not may_prune(self.path(step)):
                continue
            with claim(self.path(step)) as free:
                if free:  # one that is being read goes with a later checkpoint
                    remove(self.path(step))


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never mistaken for a damaged one."""
    hidden_folder = folder.with_name(f".deleting_{folder.name}")
    shutil.rmtree(hidden_folder, ignore_errors=True)
    folder.rename(hidden_folder)
    shutil.rmtree(hidden_folder, ignore_errors=True)
