"""Locks a run folder, so that one job at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from model.declared import Positive, declared, from_plain, to_plain
from model.errors import UserError
from pretrain.runtime.world import World
from pretrain.utils.files import write_atomically
from pretrain.utils.processes import identity

NAME = ".running.json"
BEAT_SECONDS = 15.0
# A file system that is slow for minutes is ordinary; a job can afford to wait this long for another's
# heartbeat.
SILENT_SECONDS = 300.0
# The kernel's number of the host's own process numbering (PROC_PID_INIT_INO of include/linux/proc_ns.h).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@declared()
class Mark:
    """The job that uses a folder, as NAME keeps it."""

    host: str
    """Where its process numbers mean the same (see _host)."""
    pid: Positive
    process: str | None
    """What tells the process from others that have its number later."""
    job: str | None
    """Its SLURM job."""
    restart: str
    """How often SLURM has started that job anew."""


class RunLock:
    """Marks a run folder as in use by this job, with a heartbeat every BEAT_SECONDS. Held by the main rank.

    The holder is dead when its process has ended (same host), its SLURM job is not running (any host), or it
    has sent no heartbeat for SILENT_SECONDS. An earlier start of the same SLURM job, before a requeue, is
    dead by definition.

    Args:
        folder: the run's folder; created if needed.
        option: the command's option that gives another folder, for messages.
        parent_option: the one that gives another place for it.

    Raises:
        UserError: another job that is not dead holds the folder, or the folder cannot be written.
    """

    def __init__(self, folder: Path, option: str = "name", parent_option: str = "runs_dir") -> None:
        self.path = folder / NAME
        self._option = option
        self._this_job = Mark(
            _host(),
            os.getpid(),
            identity(os.getpid()),
            os.environ.get("SLURM_JOB_ID"),
            os.environ.get("SLURM_RESTART_COUNT", "0"),
        )
        self._stop = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise UserError(
                f"{parent_option}: cannot write {error.filename} ({error.strerror}); give a folder that can "
                f"be written with --{parent_option}"
            ) from None
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the folder for other jobs."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._holder() == self._this_job:
                self.path.unlink()

    def _take(self) -> None:
        with _one_process_at_a_time(self.path.with_name(f"{NAME}.lock")):
            self._refuse_if_alive()
            write_atomically(self.path, json.dumps(to_plain(self._this_job)))

    def _holder(self) -> Mark | None:
        """The job that has marked the folder; None where there is no mark, or none that can be read."""
        try:
            return from_plain(Mark, json.loads(self.path.read_text()))
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def _refuse_if_alive(self) -> None:
        try:
            silence = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return
        holder = self._holder()
        alive = _lives(holder, self._this_job) if holder else None
        if alive is None:
            alive = silence < SILENT_SECONDS
        if alive:
            name = f"process {holder.pid} on {holder.host}" if holder else "another job"
            if holder and holder.job:
                name += f", SLURM job {holder.job}"
            raise UserError(
                f"{self._option}: {self.path.parent} is in use by {name} (last heartbeat "
                f"{max(silence, 0):.0f} s ago); wait for it, stop it, or give another --{self._option}"
            )

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)


@contextlib.contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Admit one process at a time, across hosts whose file system has locks (NFS 4, Lustre and GPFS do)."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class RunLocks:
    """RunLock for all ranks: the main rank takes it, and a refusal is raised on every rank.

    Use it as a context manager.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self._lock: RunLock | None = None

    def take_existing(self) -> None:
        """Take the folder if it exists: nothing in it may be read while another job writes. Collective.

        Raises:
            UserError: see RunLock.
        """
        if self.world.broadcast(self.folder.is_dir()):
            self.take()

    def take(self) -> None:
        """Take the folder, creating it if needed. A second call does nothing. Collective.

        Raises:
            UserError: see RunLock.
        """

        def take() -> None:
            if self._lock is None:
                self._lock = RunLock(self.folder)

        self.world.once(take)

    def __enter__(self) -> RunLocks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()


def _host() -> str:
    """Names where process numbers mean the same: this host, or a container with its own numbers."""
    with contextlib.suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        if namespace != INITIAL_PID_NAMESPACE:
            return f"{socket.gethostname()}/pid:{namespace}"
    return socket.gethostname()


def _lives(holder: Mark, this_job: Mark) -> bool | None:
    """Whether the job that marked a folder still runs; None if that cannot be told from here."""
    if holder.job and holder.job == this_job.job and holder.restart != this_job.restart:
        return False
    if holder.host == this_job.host:
        process = identity(holder.pid)
        return process is not None and process == holder.process
    return _job_lives(holder.job) if holder.job and holder.job != this_job.job else None


def _job_lives(job: str) -> bool | None:
    """Whether SLURM runs the job; None if SLURM cannot be asked."""
    if shutil.which("squeue") is None:
        return None
    try:
        result = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%T"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode != 0:
        return False if "Invalid job id" in result.stderr else None
    return any(
        state.strip() in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED") for state in result.stdout.split()
    )
