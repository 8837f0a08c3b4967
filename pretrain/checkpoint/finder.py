"""Which checkpoints a run has, and which of them is the newest whose files are as they were written."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pretrain.checkpoint.manifest import MANIFEST, verify

MOST_DIGITS = 12  # of a step


def checkpoint_steps(run_folder: Path) -> list[int]:
    """Steps that have a finished checkpoint in a run's folder, ascending."""
    try:
        # scandir tells folders from files as they were listed. Looking at each of them afterwards would miss what a
        # run has pruned meanwhile, and with it every checkpoint of a run that keeps one.
        with os.scandir(_all(run_folder)) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [name.removeprefix("step_") for name in folders if name.startswith("step_")]
    # isascii: "²" is a digit for isdigit, and no number
    return sorted(
        int(name) for name in names if name.isascii() and name.isdigit() and len(name) <= MOST_DIGITS
    )


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint of *step*."""
    return _all(run_folder) / f"step_{step:06d}"


def newest_valid(
    run_folder: Path,
    steps: Iterable[int],
    problem_of: Callable[[Path], str | None] = verify,
    passed_over: Callable[[Path, str], object] = lambda folder, problem: None,
) -> Path | None:
    """The checkpoint of the highest of *steps* that is valid; None when none is.

    Args:
        problem_of: what is wrong with a checkpoint, None when nothing is. Ranks that share the work agree in here.
        passed_over: is given each newer checkpoint and what is wrong with it, as soon as that is known.
    """
    for step in sorted(steps, reverse=True):
        folder = checkpoint_path(run_folder, step)
        problem = problem_of(folder)
        if problem is None:
            return folder
        passed_over(folder, problem)
    return None


class Hold:
    """Keeps a checkpoint from being pruned for as long as this object lives, where the file system has locks.

    A run that goes on prunes what others read. Without it, reading would have to be faster than the next checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(OSError):  # being pruned, damaged, or on a file system without locks: it may vanish
            file = os.open(folder / MANIFEST, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
            fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether nobody holds a checkpoint (see Hold), and inside, nobody can."""
    with ExitStack() as opened:
        free = True
        try:
            file = opened.enter_context((folder / MANIFEST).open("rb+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # damaged, or on a file system without locks
            pass
        yield free


def _all(run_folder: Path) -> Path:
    return run_folder / "checkpoints"
