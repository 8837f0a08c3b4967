"""What started this process: the launcher's variables, checked before heavy imports, its processes, and the
command that continues the run.

torchrun, deepspeed and slurm/task.sh set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A wrong
value would otherwise show minutes later, when the ranks do not find each other, or as a library's traceback.

``kill`` of a launcher does not always reach its ranks: ``deepspeed`` on one node forwards no signals, and
kill -9 never reaches child processes. So they look whether it still runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from model.errors import MachineError, UserError, quote
from pretrain.utils.env_check import check_variables
from pretrain.utils.format import count_of

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
    return _read_or_alone().rank


def environment_size() -> int:
    """The number of ranks; 1 without a launcher, and in an invalid environment."""
    return _read_or_alone().size


def _read_or_alone() -> Launch:
    try:
        return read_environment()
    except UserError:
        return Launch()


def read_environment() -> Launch:
    """Read the launcher's variables; a process without a launcher has a world size of 1.

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
            f"LOCAL_RANK: {local_rank} is not valid for {count_of(local_size, 'rank')} on "
            f"this machine; valid: 0 to {local_size - 1}"
        )
    return Launch(rank, local_rank, size, local_size)


def check_environment() -> Launch:
    """Reject an environment in which the ranks could not connect.

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
    """Reject a number of CPU threads per rank that is not valid on this machine.

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
    """Reject a port on which another process of this machine listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                return  # other errors are left to the rendezvous
            why = "is taken on" if error.errno == errno.EADDRINUSE else "may not be used by you on"
            where = f"MASTER_PORT: {port} {why} {socket.gethostname()}"
            if "SUBMIT_LINE" in os.environ:  # of slurm/launch.sh, whose port depends on the job and its start
                raise MachineError(f"{where}; the job's next start has another") from None
            raise UserError(
                f"{where}; give another: deepspeed --master_port N, or torchrun --master_port N"
            ) from None


SCHEDULER = "STUDY_PROCESS"
"""The environment variable with the process that trains a study's runs: a command, a program, a notebook's
kernel."""
_COMMANDS = ("deepspeed", "torchrun")


def find_launchers() -> list[psutil.Process]:
    """The launchers among this process's ancestors, and what trains the study that its run is part of.

    Empty for a program started by hand or by a batch system's task: users who start it with nohup or
    setsid want it to outlive the shell.
    """
    found = []
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is another user's
        for parent in psutil.Process().parents():
            if str(parent.pid) == os.environ.get(SCHEDULER) or is_launcher(parent.cmdline()):
                found.append(parent)
    return found


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher of ranks: a script of that name, or its module."""
    names = [Path(part).name for part in command[:2]]
    module = next((module for flag, module in pairwise(command) if flag == "-m"), "")
    named = any(name in _COMMANDS for name in names)
    return named or module == "torch.distributed.run" or module.startswith("deepspeed.")


def find_ended(known: Sequence[psutil.Process]) -> int | None:
    """The first of *known* (see find_launchers) that has ended; None while all still run."""
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                continue
        return process.pid
    return None


def is_group_running(group: int) -> bool:
    """Whether a process of the process group still runs."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # What has ended stays in the group until its parent looks.
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def report_progress() -> None:
    """Tell slurm/launch.sh that a new step is saved: it counts the starts that save none, and limits them."""
    if file := os.environ.get("FAILURES_FILE"):
        with contextlib.suppress(OSError):  # the next checkpoint reports it again
            Path(file).unlink(missing_ok=True)


def is_requeued() -> bool:
    """Whether SLURM has started this job before: it continues what it began."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def continue_command(arguments: list[str], steps: int, never: bool = False) -> str | None:
    """The command that continues the run to *steps*, quoted for a shell: the one that started this session,
    with other steps.

    Args:
        arguments: of this session, without the program's name.
        never: whether its setting resume is never.

    Returns:
        None in a job whose script does not take these arguments, as that of a study.
    """
    command = _command([argument for argument in arguments if not argument.startswith("--local_rank")])
    if not command:
        return None
    command = _leave_out(_leave_out(command, "--steps"), "--resume", "never")
    return shlex.join([*command, *(["--resume", "auto"] if never else []), "--steps", str(steps)])


def _leave_out(command: list[str], flag: str, value: str | None = None) -> list[str]:
    """A command line without a flag and its *value*, or any value for None."""
    joined = f"{flag}={value or ''}"
    left = [each for each in command if not (each.startswith(joined) if value is None else each == joined)]
    while flag in left:
        at = left.index(flag)
        if value not in (None, *left[at + 1 : at + 2]):
            break
        del left[at : at + 2]
    return left


def _command(arguments: list[str]) -> list[str]:
    """What started this session with *arguments*: the sbatch line of a job, else the launcher as it was
    typed, or, where that runs on another machine, what the environment shows of it. Without a launcher the
    process itself, as it was typed: ``deepspeed`` would start a rank for each GPU."""
    if (submitted := os.environ.get("SUBMIT_LINE")) is not None:  # by slurm/launch.sh
        return shlex.split(submitted)
    commands = []
    for launcher in reversed(find_launchers()):  # the outermost first
        with contextlib.suppress(psutil.Error):  # it has ended
            commands.append(launcher.cmdline())
    # RANK and WORLD_SIZE are set by then, also without a launcher.
    alone = read_environment().size == 1 and not {"LOCAL_SIZE", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    for command in [*commands, *([sys.orig_argv] if alone else [])]:
        # On other machines deepspeed starts this module.
        own = any(part.endswith(".launcher.launch") for part in command)
        if command[len(command) - len(arguments) :] == arguments and not own:
            return _to_typed_command(command)
    # A program of the user's has called train.
    return [*(["head-schedules", "train"] if alone else _launcher_of_environment()), *arguments]


def _to_typed_command(command: list[str]) -> list[str]:
    """A process's command line with the program's name alone, and without the interpreter of a script that
    the shell finds."""
    script = len(command) > 1 and shutil.which(Path(command[1]).name) is not None
    program, *rest = command[script:]
    return [Path(program).name, *rest]


def _launcher_of_environment() -> list[str]:
    launch = read_environment()
    here, nodes = str(launch.local_size), launch.size // launch.local_size
    if "TORCHELASTIC_RUN_ID" in os.environ:
        several = ["--nnodes", str(nodes)] if nodes > 1 else []
        return ["torchrun", *several, "--nproc_per_node", here, "-m", "pretrain.main"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    first = [str(number) for number in range(launch.local_size)]
    number = ["--num_accelerators", here] if launch.local_size > 1 or nodes > 1 else []
    if nodes > 1:
        number = ["--hostfile", "hostfile", "--num_nodes", str(nodes), *number]
    elif "LOCAL_SIZE" in os.environ and len(devices) == len(first) and devices != first and "" not in devices:
        # DeepSpeed's launcher sets the variable in every rank, and ignores it if a number is given.
        number = ["--include", f"localhost:{','.join(devices)}"]
    return ["deepspeed", *number, "--module", "pretrain.main"]
