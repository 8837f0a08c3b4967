"""Reads and checks the launcher's environment variables, before heavy imports.

torchrun, deepspeed and slurm/task.sh set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A wrong
value would otherwise show minutes later, when the ranks do not find each other, or as a library's traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from model.errors import UserError, shown
from pretrain.runtime.launchers import is_launcher
from pretrain.utils.variables import check_variables

THREADS_PER_CORE = 4
"""Most threads per rank for each core of the machine: more only wait, and very many end the process."""
DEFAULT_PORT = 29500
LOOK_SECONDS = 0.1
BUSY_SHARE = 0.4
"""Share of the cores' time, over LOOK_SECONDS, from which they count as busy."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were launched together."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1


def environment_rank() -> int:
    """This process's rank; 0 without a launcher, and in an invalid environment, whose error must be
    printed."""
    try:
        return read_environment().rank
    except UserError:
        return 0


def read_environment() -> Launch:
    """Read the launcher's variables; a process without a launcher is a world of size 1.

    Raises:
        UserError: a variable is not a number or out of range, or variables contradict each other.
    """
    size = _integer("WORLD_SIZE", 1, least=1)
    rank = _integer("RANK", 0)
    if "RANK" not in os.environ and size > 1:
        raise UserError(
            f"RANK: not set, though WORLD_SIZE is {size}; start with deepspeed or torchrun, or unset "
            "WORLD_SIZE"
        )
    if rank >= size:
        reason = f"WORLD_SIZE is {size}" if "WORLD_SIZE" in os.environ else "WORLD_SIZE is not set"
        raise UserError(
            f"RANK: {rank} is not valid, since {reason}; ranks count from 0 to WORLD_SIZE - 1: start with "
            "deepspeed or torchrun, or unset RANK"
        )
    name = "LOCAL_SIZE" if "LOCAL_SIZE" in os.environ else "LOCAL_WORLD_SIZE"
    local_size = _integer(name, size, least=1)
    local_rank = _integer("LOCAL_RANK", 0)
    if local_rank >= local_size:
        raise UserError(
            f"LOCAL_RANK: {local_rank} is not valid for {local_size} rank{'s' * (local_size > 1)} on this "
            f"machine; valid: 0 to {local_size - 1}"
        )
    return Launch(rank, local_rank, size, local_size)


def check_environment() -> Launch:
    """Refuse an environment in which the ranks could not connect.

    Raises:
        UserError: as read_environment; see check_variables; a rendezvous port that is invalid or taken.
    """
    launch = read_environment()
    check_variables("start", *["ranks"] * (launch.size > 1))
    port = rendezvous_port(launch)
    # torchrun's own process listens there for its ranks, and so may a program that has connected them.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.rank == 0 and launch.size > 1 and not (agent or connected()):
        _check_port(port)
    return launch


def connected() -> bool:
    """Whether this process has a process group; torch is not imported."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def rendezvous_port(launch: Launch) -> int:
    """The port at which the ranks meet.

    The deepspeed command gives every run the same one unless it is told otherwise. Then ranks of one machine
    take a port of their launcher's own, below those that Linux gives to outgoing connections.

    Raises:
        UserError: MASTER_PORT is not a port.
    """
    port = _integer("MASTER_PORT", DEFAULT_PORT, least=1, most=65535)
    if port == DEFAULT_PORT and 1 < launch.size == launch.local_size and "LOCAL_SIZE" in os.environ:
        launcher = psutil.Process(os.getppid())
        with contextlib.suppress(psutil.Error):
            if is_launcher(launcher.cmdline()):
                return 20_000 + launcher.pid % 9000
    return port


def check_threads(threads: int | None) -> None:
    """Refuse a number of CPU threads per rank that is not valid on this machine.

    Raises:
        UserError: the message gives the valid range.
    """
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise UserError(
            f"threads: {shown(threads)} is not valid; give 1 to {most} CPU threads per rank "
            f"({THREADS_PER_CORE} for each core of this machine), or leave it out"
        )


def settle_waiting_threads() -> None:
    """Where other work keeps the cores busy, let OpenMP's threads sleep while they wait, instead of spinning.
    Before torch is imported.

    Spinning is up to half as fast again on an idle machine, and takes nearly half of the speed beside one
    other busy process on two cores (docs/log/speed.md). OMP_WAIT_POLICY decides where it is set. The
    numbers do not change. Takes a tenth of a second; the ranks of a node share what the first has found.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # said later; another system
        launch = read_environment()
        job = f"MASTER_PORT={os.environ.get('MASTER_PORT', DEFAULT_PORT)}" if launch.local_size > 1 else ""
        if _shared(job, launch.local_rank) if job else busy_with_others(job):
            os.environ["OMP_WAIT_POLICY"] = "passive"


def busy_with_others(job: str, proc: Path = Path("/proc"), seconds: float = LOOK_SECONDS) -> bool:
    """Whether the cores that this process may use are now busy with work that is not the job's.

    Args:
        job: an environment variable with its value that all processes of the job have; empty if this process
            is the job.

    Raises:
        OSError, ValueError: *proc* does not hold what Linux writes there.
    """
    busy, total, own = _ticks(job, proc)
    time.sleep(seconds)
    busy_then, total_then, own_then = _ticks(job, proc)
    return (busy_then - busy) - (own_then - own) >= BUSY_SHARE * max(1, total_then - total)


def _ticks(job: str, proc: Path) -> tuple[int, int, int]:
    """Ticks of the clock so far, over those cores: busy, all, and busy with the job on any core."""
    busy = total = own = 0
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    for name, *numbers in map(str.split, (proc / "stat").read_text("ascii").splitlines()):
        if name in cores:
            ticks = [int(number) for number in numbers[:8]]  # what follows is part of these
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and waiting for a disk
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            named = job and f"\0{job}\0".encode() in b"\0" + (folder / "environ").read_bytes()
            if named or folder.name == str(os.getpid()):
                # After the name, which may hold anything: user, system, and both of children that have ended.
                own += sum(map(int, (folder / "stat").read_bytes().rpartition(b")")[2].split()[11:15]))
    return busy, total, own


def _shared(job: str, local_rank: int) -> bool:
    """What busy_with_others says to the first rank of this node that asks; a rank that asks again is of a new
    launch."""
    port = "".join(filter(str.isdigit, job))
    path = Path(tempfile.gettempdir(), f"head_schedules-{os.getuid()}-{port}")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        answer, *ranks = file.read().split() or ["?"]
        if answer not in ("busy", "idle") or str(local_rank) in ranks:
            answer, ranks = "busy" if busy_with_others(job) else "idle", []
            atexit.register(path.unlink, missing_ok=True)
        file.seek(0)
        file.truncate()
        file.write(" ".join([answer, *ranks, str(local_rank)]))
    return answer == "busy"


def _integer(name: str, default: int, least: int = 0, most: int = 10**6) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise UserError(
            f"{name}: {shown(text)} in the environment is not valid; give an integer from {least} to {most}, "
            "as deepspeed and torchrun do, or unset it"
        )
    return int(text)


def _check_port(port: int) -> None:
    """Refuse a port on which another process of this machine listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # other errors are left to the rendezvous
            why = "is taken on" if error.errno == errno.EADDRINUSE else "may not be used by you on"
            raise UserError(
                f"MASTER_PORT: {port} {why} {socket.gethostname()}; give another: deepspeed --master_port N, "
                "or torchrun --master_port N"
            ) from None
