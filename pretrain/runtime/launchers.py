"""Finds the processes that launched this rank, and tells whether they still run.

``kill`` of a launcher does not always reach its ranks: ``deepspeed`` on one node forwards no signals, and
kill -9 never reaches child processes. Nothing heavy is imported here (see pretrain.runtime.signals).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

_COMMANDS = ("deepspeed", "torchrun", "pretrain-study")
_MODULES = ("torch.distributed.run", "pretrain.study")


def find_launchers() -> list[psutil.Process]:
    """The launchers among this process's ancestors.

    Empty for a program started by hand or by a batch system's task: users who start it with nohup or
    setsid want it to outlive the shell.
    """
    found = []
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is another user's
        for parent in psutil.Process().parents():
            if is_launcher(parent.cmdline()):
                found.append(parent)
    return found


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher of ranks: a script of that name, or its module."""
    names = [Path(part).name for part in command[:2]]
    module = next((module for flag, module in pairwise(command) if flag == "-m"), "")
    study = ("head-schedules", "study") in pairwise(Path(part).name for part in command[:3])
    return (
        study
        or any(name in _COMMANDS for name in names)
        or module in _MODULES
        or module.startswith("deepspeed.")
    )


def find_ended(known: Sequence[psutil.Process]) -> int | None:
    """The first of *known* (see find_launchers) that has ended; None while all still run."""
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                continue
        return process.pid
    return None
