"""Locks a run's folder, so that one job at a time uses it, and prepares it before the first step:
configuration, merged ds_config, tokenizer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from model.errors import MachineError, UserError
from pretrain.config.run_config import RunConfig
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.run.data import RunData
from pretrain.run.decisions import Decisions
from pretrain.runtime.world import World
from pretrain.utils.files import atomic_folder, remove_leftovers, write_atomically


def prepare_run_folder(run: RunConfig, data: RunData, decisions: Decisions, world: World) -> None:
    """Write the run's configuration, decisions, merged ds_config and tokenizer into its folder. Collective.

    Raises:
        UserError: on every rank, when the folder cannot be written.
    """

    def prepare() -> None:
        try:
            for name in ("checkpoints", "plots"):
                (run.folder / name).mkdir(parents=True, exist_ok=True)
            remove_leftovers(run.folder)
            write_atomically(run.folder / "config.yaml", run.to_yaml())
            for name, content in (
                ("decisions", decisions.to_dict()),
                ("ds_config", decisions.ds_config.value),
            ):
                write_atomically(run.folder / f"{name}.json", json.dumps(content, indent=2) + "\n")
            _write_tokenizer(run.folder / "tokenizer", data.tokenizer)
        except OSError as error:
            raise UserError(
                f"runs_dir: cannot write {error.filename} ({error.strerror}); give a folder that can be "
                "written with --runs_dir"
            ) from None

    world.on_rank_zero(prepare)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the data's tokenizer, unless the folder holds it: checkpoints refer to it by its hash.

    An imported model may have another one that gives the same ids (see check_resume); its checkpoint keeps
    that one.
    """
    with contextlib.suppress(UserError):
        if folder.exists() and tokenizer_hash(load_tokenizer(folder)) == tokenizer_hash(tokenizer):
            return
    with atomic_folder(folder) as partial:
        tokenizer.save(partial)


NAME = ".running"


class RunLock:
    """Keeps a folder for this process until ``release``, by a lock of the file system on the file NAME in it.

    The system gives the lock back when the process ends in whatever way. It holds across hosts where the file
    system has such locks (NFS 4, GPFS, Lustre mounted with ``flock``), and is left out where it has none.

    Args:
        folder: the run's folder; created if needed.
        option: the command's option that gives another folder, for messages.
        parent_option: the one that gives another place for it.

    Raises:
        UserError: another process holds the folder, or the folder cannot be written.
    """

    def __init__(self, folder: Path, option: str = "name", parent_option: str = "runs_dir") -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / NAME).open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{parent_option}: cannot write {error.filename} ({error.strerror}); give a folder that can "
                f"be written with --{parent_option}"
            ) from None
        job = os.environ.get("SLURM_JOB_ID")
        with contextlib.suppress(OSError):  # a full disk, or a file system without locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._file as file:
                    file.seek(0)
                    holder = file.read(200).strip()
                # An earlier start of this job, on a node that is not done with it, will be gone.
                earlier = job is not None and holder.endswith(f"SLURM job {job}")
                raise (MachineError if earlier else UserError)(
                    f"{option}: {folder} is in use by {holder or 'another job'}; wait for it, stop it, or "
                    f"give another --{option}"
                ) from None
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.write(f", SLURM job {job}" if job else "")
            self._file.flush()

    def release(self) -> None:
        """Release the folder for other jobs."""
        self._file.close()


def is_held(folder: Path) -> bool:
    """Whether a process holds *folder* by a RunLock; False where the file system has no locks.

    Takes the lock for an instant, in which another process would be refused: ask rarely.
    """
    with contextlib.suppress(OSError), (folder / NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def may_have_begun(run: RunConfig, world: World) -> bool:
    """Whether the run has a folder, or may have one in its mirror. Collective."""
    exists: bool = world.broadcast(os.path.isdir(run.folder))  # noqa: PTH112 — a name may be too long
    return exists or run.checkpoint.mirror is not None


def hold_run_folder(run: RunConfig, world: World, held: contextlib.ExitStack) -> None:
    """Keep the run's folder for this job until *held* is closed. Collective. Raises as RunLock."""

    def hold() -> None:
        held.callback(RunLock(run.folder).release)

    world.on_rank_zero(hold)
