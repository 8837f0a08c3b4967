"""Reads and checks the launcher's environment variables, before heavy imports.

torchrun, deepspeed and slurm/task.sh set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A wrong
value would otherwise show minutes later, when the ranks do not find each other, or as a library's traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from dataclasses import dataclass

import psutil

from model.errors import UserError, quote
from pretrain.runtime.launchers import is_launcher
from pretrain.utils.env_check import check_variables

THREADS_PER_CORE = 4
"""Most threads per rank for each core of the machine: more only wait, and very many end the process."""
DEFAULT_PORT = 29500


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
            f"LOCAL_RANK: {local_rank} is not valid for {local_size} rank{'s' if local_size > 1 else ''} on "
            f"this machine; valid: 0 to {local_size - 1}"
        )
    return Launch(rank, local_rank, size, local_size)


def check_environment() -> Launch:
    """Refuse an environment in which the ranks could not connect.

    Raises:
        UserError: as read_environment; see check_variables; a rendezvous port that is invalid or taken.
    """
    launch = read_environment()
    check_variables("start", *(["ranks"] if launch.size > 1 else []))
    port = rendezvous_port(launch)
    # torchrun's own process listens there for its ranks, and so may a program that has connected them.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launch.rank == 0 and launch.size > 1 and not (agent or has_process_group()):
        _check_port(port)
    return launch


def has_process_group() -> bool:
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
            f"threads: {quote(threads)} is not valid; give 1 to {most} CPU threads per rank "
            f"({THREADS_PER_CORE} for each core of this machine), or leave it out"
        )


def _integer(name: str, default: int, least: int = 0, most: int = 10**6) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise UserError(
            f"{name}: {quote(text)} in the environment is not valid; give an integer from {least} to {most}, "
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
