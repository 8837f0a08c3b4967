"""What continues a run: the command that started it; and for its job script, that it makes progress."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path

import psutil

from pretrain.runtime.environment import read_environment
from pretrain.runtime.launchers import find_launchers


def report_progress() -> None:
    """Tell slurm/launch.sh that a new step is saved: it counts the starts that save none, and limits them."""
    if file := os.environ.get("FAILURES_FILE"):
        with contextlib.suppress(OSError):  # the next checkpoint reports it again
            Path(file).unlink(missing_ok=True)


def continue_command(arguments: list[str], steps: int) -> str | None:
    """The command that continues the run to *steps*, quoted for a shell: the one that started this session,
    with other steps.

    Args:
        arguments: of this session, without the program's name.

    Returns:
        None in a job whose script does not take these arguments, as that of a study.
    """
    command = _command([argument for argument in arguments if not argument.startswith("--local_rank")])
    if not command:
        return None
    command = [argument for argument in command if not argument.startswith("--steps=")]
    while "--steps" in command:
        at = command.index("--steps")
        del command[at : at + 2]
    return shlex.join([*command, "--steps", str(steps)])


def _command(arguments: list[str]) -> list[str]:
    """What started this session with *arguments*: the sbatch line of a job, else the launcher as it was
    typed, or, where that runs on another machine, what the environment shows of it."""
    if (submitted := os.environ.get("SUBMIT_LINE")) is not None:  # by slurm/launch.sh
        return shlex.split(submitted)
    for launcher in reversed(find_launchers()):  # the outermost first
        with contextlib.suppress(psutil.Error):  # it has ended
            command = launcher.cmdline()
            # On other machines deepspeed starts this module of its own.
            own = any(part.endswith(".launcher.launch") for part in command)
            if command[-len(arguments) :] == arguments and not own:
                return _to_typed_command(command)
    return [*_launcher_of_environment(), *arguments]


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
        # DeepSpeed's launcher sets the variable in every rank, and ignores it beside a number.
        number = ["--include", f"localhost:{','.join(devices)}"]
    return ["deepspeed", *number, "--module", "pretrain.main"]
