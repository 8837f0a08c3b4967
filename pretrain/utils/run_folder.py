"""Where the checkpoints of a run are in its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError

STEP_FOLDER = re.compile(r"step_([0-9]{6,12})")
"""The name of a checkpoint's folder."""


def checkpoints_folder(run_folder: Path) -> Path:
    """The folder that holds them; with it a folder is that of a run."""
    return run_folder / "checkpoints"


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint of *step*."""
    return checkpoints_folder(run_folder) / f"step_{step:06d}"


def step_of(name: str) -> int:
    """The step of a checkpoint's folder of that name; ValueError for another name."""
    return int(name.removeprefix("step_"))


def describe_missing_step(run_folder: str | Path, step: int, steps: Sequence[int]) -> str:
    """That a run has no checkpoint of *step*, but some of *steps*."""
    nearest = min(steps, key=lambda each: abs(each - step))
    return f"no checkpoint of step {step} in {str(run_folder)!r}; the nearest is that of {nearest}"


def checkpoint_steps(run_folder: Path) -> list[int]:
    """Steps that have a finished checkpoint in a run's folder, ascending.

    Raises:
        UserError: the folder is there, but cannot be read.
    """
    try:
        # scandir tells folders from files as they were listed. Checking each of them afterwards would miss
        # those that a run has pruned meanwhile: every checkpoint of a run that keeps only one.
        with os.scandir(checkpoints_folder(run_folder)) as entries:
            # A broken link also counts: opening it reports what is wrong.
            folders = [e.name for e in entries if e.is_dir(follow_symlinks=False) or e.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(
            f"run: {error.filename} cannot be read ({error.strerror}); give a run's folder"
        ) from None
    return sorted(int(found[1]) for found in map(STEP_FOLDER.fullmatch, folders) if found)
