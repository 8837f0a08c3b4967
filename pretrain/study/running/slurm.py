"""Submits a study to SLURM: one array task for each run that is not finished.

Runs whose batch cannot be shared by all tasks that the script asks for get separate arrays with fewer tasks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from itertools import groupby

from model.errors import UserError, quote
from pretrain.config.sources import ROOT
from pretrain.engine.batch import most_ranks
from pretrain.study.planned import PlannedRun, Study
from pretrain.study.results import task_names

SCRIPT = "slurm/study.sh"
RANKS = re.compile(r"-n|-G|--ntasks|--gres|--gpus")
"""Beginnings of sbatch's options that say how many tasks or GPUs a job has."""


def format_array(numbers: Sequence[int], parallel: int | None = None) -> str:
    """Task numbers as sbatch's --array takes them: 0-3,7 or 0-3,7%2 (at most two at a time)."""
    parts = []
    # Consecutive numbers differ from their places in the sequence by the same amount.
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *more = (number for _, number in pairs)
        parts.append(f"{first}-{more[-1]}" if more else str(first))
    return ",".join(parts) + (f"%{parallel}" if parallel else "")


def sbatch_commands(
    study: Study, todo: Sequence[PlannedRun], parallel: int | None = None, options: Sequence[str] = ()
) -> list[list[str]]:
    """The lines that submit runs of a study; the script reads the study's folder.

    There is one command, or one for each number of ranks where some runs have too small a batch for the
    script's; with options that give the number of tasks or GPUs there is always one.

    Args:
        todo: the runs; the array has their task numbers (see task_names).
        parallel: how many of an array run at a time, at most; None: no limit.
        options: of sbatch, such as ``--partition=big``.
    """
    number = {name: index for index, name in enumerate(task_names(study))}
    most = script_ranks()
    given, groups = any(map(RANKS.match, options)), dict[int, list[PlannedRun]]()
    for planned in todo:
        groups.setdefault(most if given else most_ranks(planned.run, most), []).append(planned)
    commands = []
    for ranks, group in sorted(groups.items(), reverse=True):
        array = format_array(sorted(number[planned.name] for planned in group), parallel)
        fewer = [f"--ntasks-per-node={ranks}", f"--gres=gpu:{ranks}"] if ranks < most else []
        more = [f"--job-name={study.name}", *fewer, *options]
        commands.append(["sbatch", f"--array={array}", *more, SCRIPT, os.path.realpath(study.folder)])
    return commands


def run_of_task(study: Study, number: str) -> PlannedRun:
    """The run of an array task.

    Args:
        number: the task's, or "only" where the job is no array, for a study of one run.

    Raises:
        UserError: there is no such number, or its run is no longer in the study.
    """
    names = task_names(study)
    runs = {planned.name: planned for planned in study.runs}
    if number == "only" and len(runs) == 1:
        return study.runs[0]
    name = names[int(number)] if number.isdecimal() and int(number) < len(names) else ""
    if name not in runs:
        valid = format_array([number for number, name in enumerate(names) if name in runs])
        was = f" ({name}, which the study does not name any more)" if name else ""
        task = f"array: task {quote(number, plain=True)}{was} is no run of {study.name}"
        raise UserError(f"{task}; cancel it (scancel); valid: --array={valid}")
    return runs[name]


def script_ranks() -> int:
    """Tasks on a node that the script asks for. Raises UserError without the script."""
    if not (ROOT / SCRIPT).is_file():
        valid = "install the project from a checkout, with pip install -e ."
        raise UserError(f"slurm: {ROOT / SCRIPT} does not exist; {valid}")
    found = re.search(r"^#SBATCH --ntasks-per-node=(\d+)", (ROOT / SCRIPT).read_text("utf-8"), re.MULTILINE)
    return int(found[1]) if found else 1


def submit(command: Sequence[str]) -> str:
    """Submit a job array and return its number.

    Raises:
        UserError: there is no sbatch, or it rejects the job.
    """
    if shutil.which("sbatch") is None:
        valid = "submit it from a login node, or leave out --slurm to run it here"
        raise UserError(f"slurm: no sbatch on this machine; {valid}")
    from pretrain.engine.deepspeed_logging import environment_elsewhere

    done = subprocess.run(
        command, cwd=ROOT, env=environment_elsewhere(), capture_output=True, encoding="utf-8"
    )
    number = re.search(r"\d+", done.stdout)
    if done.returncode or number is None:
        problem = " ".join((done.stderr or done.stdout).split())[:300]
        raise UserError(f"slurm: {shlex.join(command)} was rejected: {problem}")
    return number[0]
