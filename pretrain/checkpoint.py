"""Checkpoints: written whole or not at all, verified before they are trusted, pruned to the ones worth keeping.

A checkpoint is a folder ``checkpoints/step_000500`` that holds ``deepspeed/`` (the engine's own files, one set per
rank), ``tokenizer/``, ``state.json`` (TrainingState), ``manifest.json`` (size and hash of every file), and in runs that
probe their features ``features.safetensors`` (those of the last probe). It is written under a hidden name, synced, and
renamed when every rank has finished; ``latest`` is then replaced in one step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.errors import UserError
from pretrain.config import CheckpointConfig
from pretrain.world import World

FORMAT = 1
ENGINE_FOLDER = "deepspeed"
FEATURES = "features.safetensors"
# What DeepSpeed's ds_to_universal makes of it, when somebody runs that.
UNIVERSAL_FOLDER = "universal"


@dataclass
class TrainingState:
    """Everything but tensors that a run continues from."""

    step: int = 0
    """Optimizer steps attempted so far."""
    sequences: int = 0
    """Training sequences consumed so far: where the data goes on."""
    tokens: int = 0
    """Label tokens seen by all ranks so far."""
    seconds: float = 0.0
    """Wall-clock seconds spent training, over all sessions."""
    skipped: int = 0
    """Updates skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """The same, since the last applied update."""
    released: dict[str, int] = field(default_factory=dict)
    """Learning-rate rules that were released by maturity, with the step from which they were."""
    maturity: dict[str, Any] = field(default_factory=dict)
    """What the probes of pretrain/maturity.py have found so far."""
    from_seed: bool = True
    """Whether the weights of step 0 were drawn from the seed, and not made elsewhere."""
    micro_batch: int = 0
    """Sequences per rank and forward pass."""
    run: dict[str, Any] = field(default_factory=dict)
    """The RunConfig."""
    model: dict[str, Any] = field(default_factory=dict)
    """The ModelConfig."""
    data: dict[str, Any] = field(default_factory=dict)
    """What identifies the data: corpora with hashes and weights, tokenizer hash."""
    world: dict[str, Any] = field(default_factory=dict)
    """World.record(), with ZeRO stage and dtype."""


class _HashingFile:
    """A file that hashes what passes through and keeps the first error instead of raising it.

    torch.save must not see the error: an exception half-way through would leave the other ranks in a collective.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self.bytes = 0
        self._hash = xxhash.xxh3_128()
        try:
            self._file = path.open("wb")
        except OSError as error:
            self.error = error

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        self._hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do: close() syncs."""

    def close(self) -> dict[str, Any]:
        """Sync to disk. Returns the manifest's entry."""
        if self.error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self.error = error
        if self.error is not None and hasattr(self, "_file"):
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._file.close()
        return {"bytes": self.bytes, "xxh3_128": self._hash.hexdigest()}


class RecordingCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, which also syncs and hashes every file and remembers what it could not write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, dict[str, Any]] = {}
        self.problem: str | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write *state_dict* to *path*; a failure ends up in ``problem``, not in an exception."""
        file = _HashingFile(Path(path))
        torch.save(state_dict, file)  # type: ignore[arg-type]
        self.written[Path(path).name] = file.close()
        if file.error is not None and self.problem is None:
            self.problem = f"cannot write {Path(path).name}: {file.error.strerror or file.error}"


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        run_folder: the run's folder.
        config: what to keep.
        world: the ranks that save and load together; every method but ``steps`` is collective.
    """

    def __init__(self, run_folder: Path, config: CheckpointConfig, world: World) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / "checkpoints"
        self.config = config
        self.world = world

    def steps(self) -> list[int]:
        """Steps that have a finished checkpoint, ascending."""
        names = [path.name for path in self.folder.glob("step_*") if path.is_dir()]
        return sorted(
            int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit()
        )

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of *step*."""
        return self.folder / f"step_{step:06d}"

    def save(
        self,
        engine: Any,
        state: TrainingState,
        tokenizer_folder: Path,
        features: dict[str, Tensor] | None = None,
    ) -> Path:
        """Write a checkpoint of *engine* and *state*; prune the ones no longer kept.

        Args:
            features: what probes of the network compare the next time, equal on all ranks (see ``read_features``).

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: on every rank alike, when any rank could not write; older checkpoints are untouched.
        """
        target = self.path(state.step)
        partial = self.folder / f".writing_{target.name}"
        self._stop_on(self._prepare(partial, tokenizer_folder) if self.world.is_main else None, partial)
        recorder = RecordingCheckpointEngine()
        engine.checkpoint_engine = recorder
        engine._copy_recovery_script = lambda save_path: None  # its layout is not ours; conversion reads ours
        engine.save_checkpoint(str(partial), tag=ENGINE_FOLDER, save_latest=False)
        recorder.save(random_state(), str(partial / ENGINE_FOLDER / f"random_rank_{self.world.rank:05d}.pt"))
        self._stop_on(recorder.problem, partial)
        written = self._gather(recorder.written)
        problem = self._finish(partial, target, state, written, features) if self.world.is_main else None
        self._stop_on(problem, partial)
        if self.world.is_main:
            self._prune(state.step)
        return target

    def newest_sound(self) -> tuple[Path, TrainingState, list[str]] | None:
        """Find the newest checkpoint whose files all have the size and hash they were written with.

        Returns:
            Its folder, its state and a line about each newer one that was passed over; None when there is none.

        Raises:
            UserError: there are checkpoints, but none is sound.
        """
        notes: list[str] = []
        for step in reversed(self.world.broadcast(self.steps())):
            folder = self.path(step)
            problem = self.world.agree(verify(folder, self.world.rank, self.world.size))
            if problem is None:
                return folder, read_state(folder), notes
            notes.append(f"checkpoint {folder.name} is damaged ({problem})")
        if notes:
            raise UserError(
                f"checkpoints: no sound one in {self.folder}: {'; '.join(notes)}; restore one, or remove "
                "the folder to start over"
            )
        return None

    def load(self, engine: Any, folder: Path) -> None:
        """Load the engine's tensors, optimizer state and this rank's random state from *folder*."""
        path, _ = engine.load_checkpoint(str(folder), tag=ENGINE_FOLDER, load_lr_scheduler_states=False)
        if path is None:
            raise UserError(f"checkpoint: DeepSpeed found nothing to load in {folder}")
        restore_random_state(
            torch.load(folder / ENGINE_FOLDER / f"random_rank_{self.world.rank:05d}.pt", weights_only=True)
        )

    def _prepare(self, partial: Path, tokenizer_folder: Path) -> str | None:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / ENGINE_FOLDER).mkdir(parents=True)
            shutil.copytree(tokenizer_folder, partial / "tokenizer")
        except OSError as error:
            return f"cannot write {error.filename or partial}: {error.strerror or error}"
        return None

    def _finish(
        self,
        partial: Path,
        target: Path,
        state: TrainingState,
        written: dict[str, Any],
        features: dict[str, Tensor] | None,
    ) -> str | None:
        """Rank 0: add state and manifest, sync, rename, point ``latest`` at the result."""
        try:
            write_synced(partial / "state.json", json.dumps(asdict(state), indent=1))
            files = {f"{ENGINE_FOLDER}/{name}": entry for name, entry in written.items()}
            if features:
                save_file(features, partial / FEATURES)
                sync_file(partial / FEATURES)
            own = [partial / "state.json", partial / FEATURES]
            for path in [*own, *sorted((partial / "tokenizer").rglob("*"))]:
                if path.is_file():
                    files[path.relative_to(partial).as_posix()] = file_entry(path)
            write_synced(partial / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
            sync_folder(partial)
            if target.exists():  # left damaged by an earlier session, or written before a fall-back
                remove(target)
            partial.rename(target)
            sync_folder(self.folder)
            write_synced(self.run_folder / "latest.new", target.name + "\n")
            (self.run_folder / "latest.new").replace(self.run_folder / "latest")
            sync_folder(self.run_folder)
        except (OSError, SafetensorError) as error:
            name = getattr(error, "filename", None) or partial
            return f"cannot write {name}: {getattr(error, 'strerror', None) or error}"
        return None

    def _gather(self, written: dict[str, Any]) -> dict[str, Any]:
        if self.world.size == 1:
            return written
        parts: list[Any] = [None] * self.world.size
        torch.distributed.all_gather_object(parts, written)
        return {name: entry for part in parts for name, entry in part.items()}

    def _stop_on(self, problem: str | None, partial: Path) -> None:
        problem = self.world.agree(problem)
        if problem is None:
            return
        if self.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        steps = self.steps()
        kept = f"the checkpoint of step {steps[-1]} stays" if steps else "there is no earlier checkpoint"
        raise UserError(f"checkpoint: {problem}; {kept} in {self.folder}")

    def _prune(self, newest: int) -> None:
        # Steps beyond the newest belong to a curve this run has left (it fell back to an older checkpoint).
        steps = [step for step in self.steps() if step <= newest]
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_every:
            keep |= {step for step in steps if step % self.config.keep_every == 0}
        for step in self.steps():
            if step not in keep:
                remove(self.path(step))


def verify(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint's files with its manifest.

    Args:
        folder: the checkpoint.
        part: which of *parts* equal shares of the files to read (each rank reads its own).

    Returns:
        None when sound, else what is wrong.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        # DeepSpeed's own converter may have made universal/ of deepspeed/, which is then free to go.
        replaced = not (folder / ENGINE_FOLDER).is_dir() and (folder / UNIVERSAL_FOLDER).is_dir()
        files = {
            name: entry
            for name, entry in manifest["files"].items()
            if not (replaced and name.startswith(f"{ENGINE_FOLDER}/"))
        }
        for name, entry in sorted(files.items())[part::parts]:
            path = folder / name
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, {entry['bytes']} were written"
            if file_entry(path) != entry:
                return f"{name} does not have the contents that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({type(error).__name__})"
    return None


def has_engine_files(folder: Path) -> bool:
    """Whether a checkpoint holds an engine's own files, not only the canonical form."""
    return (folder / ENGINE_FOLDER).is_dir()


def read_state(folder: Path) -> TrainingState:
    """Read a checkpoint's TrainingState."""
    return TrainingState(**json.loads((folder / "state.json").read_text(encoding="utf-8")))


def read_features(folder: Path) -> dict[str, Tensor]:
    """The features of the last probes before a checkpoint, by name; empty when there are none."""
    path = folder / FEATURES
    return load_file(path) if path.is_file() else {}


def file_entry(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as the manifest has them."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def write_synced(path: Path, text: str) -> None:
    """Write a text file and force it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Force a file that was written by other means to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (renames, new files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a half-deleted one is never mistaken for a damaged one."""
    doomed = folder.with_name(f".deleting_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """State of torch's generators on this rank."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set what random_state returned."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
