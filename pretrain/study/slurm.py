"""Submits a study to SLURM: one array task for each run that is not finished."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError
from pretrain.study.scheduler import ROOT
from pretrain.study.study_file import Study

SCRIPT = "slurm/study.sh"


def array_of(numbers: Sequence[int], parallel: int | None = None) -> str:
    """Task numbers as sbatch's --array takes them: 0-3,7 or 0-3,7%2 (at most two at a time)."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    text = ",".join("-".join(map(str, part)) for part in parts)
    return text + (f"%{parallel}" if parallel else "")


def sbatch_command(
    study: Study,
    folder: Path,
    numbers: Sequence[int],
    parallel: int | None = None,
    options: Sequence[str] = (),
) -> list[str]:
    """The line that submits runs of a study; the script reads the study's folder.

    Args:
        numbers: of the runs, in the study's order.
        parallel: how many run at a time, at most; None: no limit.
        options: of sbatch, such as ``--partition=big``.
    """
    array = array_of(numbers, parallel)
    return ["sbatch", f"--array={array}", f"--job-name={study.name}", *options, SCRIPT, str(folder.resolve())]


def submit(command: Sequence[str]) -> str:
    """Submit a job array and return its number.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "slurm: no sbatch on this machine; submit it from a login node, or leave out --slurm to run it here"
        )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    number = re.search(r"\d+", done.stdout)
    if done.returncode or number is None:
        problem = " ".join((done.stderr or done.stdout).split())[:300]
        raise UserError(f"slurm: {shlex.join(command)} was refused: {problem}")
    return number[0]
