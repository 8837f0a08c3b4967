"""Locks a run folder, so that one job at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.runtime.world import World

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
        with contextlib.suppress(OSError):  # a full disk, or a file system without locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._file as file:
                    file.seek(0)
                    holder = file.read(200).strip()
                raise UserError(
                    f"{option}: {folder} is in use by {holder or 'another job'}; wait for it, stop it, or "
                    f"give another --{option}"
                ) from None
            self._file.truncate(0)
            job = os.environ.get("SLURM_JOB_ID")
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.write(f", SLURM job {job}" if job else "")
            self._file.flush()

    def release(self) -> None:
        """Release the folder for other jobs."""
        self._file.close()


def may_have_begun(run: RunConfig, world: World) -> bool:
    """Whether the run has a folder, or may have one in its mirror. Collective."""
    exists: bool = world.broadcast(os.path.isdir(run.folder))  # noqa: PTH112 — a name may be too long
    return exists or run.checkpoint.mirror is not None


def hold_run_folder(run: RunConfig, world: World, held: contextlib.ExitStack) -> None:
    """Keep the run's folder for this job until *held* is closed. Collective. Raises as RunLock."""

    def hold() -> None:
        held.callback(RunLock(run.folder).release)

    world.on_rank_zero(hold)
