"""The processes that launched this rank, and whether they are still there.

``kill`` of a launcher does not always reach its ranks: ``deepspeed`` on one node passes nothing on, and kill -9 reaches
nobody's children. Nothing heavy is imported here (see pretrain.runtime.signals).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from pretrain.utils.processes import identity

_COMMANDS = ("deepspeed", "torchrun")
_TORCH = "torch.distributed.run"


def launchers() -> dict[int, str]:
    """The launchers among this process's ancestors: process number -> identity.

    Empty for a program started by hand or by a batch system's task: who leaves those running with nohup or setsid
    wants them to outlive the shell.
    """
    found = {}
    try:
        for parent in psutil.Process().parents():
            who = identity(parent.pid)
            if who is not None and is_launcher(parent.cmdline()):
                found[parent.pid] = who
    except psutil.Error:  # gone while it was looked at, or another user's: nothing above it counts
        pass
    return found


def is_launcher(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher of ranks: a script of that name, or its module."""
    names = [Path(part).name for part in command[:2]]
    module = next((module for flag, module in pairwise(command) if flag == "-m"), "")
    return any(name in _COMMANDS for name in names) or module == _TORCH or module.startswith("deepspeed.")


def gone(known: dict[int, str]) -> int | None:
    """The first of *known* (see launchers) that has ended; None while all are there."""
    return next((process for process, who in known.items() if identity(process) != who), None)
