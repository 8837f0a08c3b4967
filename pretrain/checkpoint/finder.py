"""Lists a run's checkpoints, finds the newest valid one, and keeps one that is read from being pruned."""

from __future__ import annotations

import fcntl
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.manifest import MANIFEST, verify
from pretrain.utils.files import open_regular
from pretrain.utils.run_folder import (
    checkpoint_path,
    checkpoint_steps,
    checkpoints_folder,
    describe_missing_step,
)


def is_run(folder: str | Path) -> bool:
    """Whether *folder* looks like a run's folder (and not like an exported model)."""
    return checkpoints_folder(Path(folder)).is_dir()


def require_steps(folder: str | Path, step: int | None = None) -> list[int]:
    """The steps of a run's checkpoints, ascending; *step* alone if one is asked for. Commands call this
    before they import torch.

    Raises:
        UserError: it is no run's folder, there is no checkpoint yet, or none of *step*.
    """
    if not is_run(folder):
        raise UserError(f"run: {str(folder)!r} is not a run's folder; give one such as runs/NAME")
    steps = checkpoint_steps(Path(folder))
    if not steps:
        raise UserError(f"run: {str(folder)!r} has no checkpoint yet; train until the first one is written")
    if step is None:
        return steps
    if step not in steps:
        raise UserError(f"step: {describe_missing_step(folder, step, steps)}")
    return [step]


def newest_valid(
    run_folder: Path,
    steps: Iterable[int],
    problem_of: Callable[[Path], str | None] = verify,
    passed_over: Callable[[Path, str], object] = lambda folder, problem: None,
) -> Path | None:
    """The checkpoint of the highest of *steps* that is valid; None when none is.

    Args:
        problem_of: returns what is wrong with a checkpoint, or None. Ranks that share the work agree in it.
        passed_over: receives each newer checkpoint and what is wrong with it, as soon as that is known.
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

    A run that is training prunes checkpoints even while another process reads them. Without a hold, a reader
    would have to finish before the next checkpoints are written.
    """

    def __init__(self, folder: Path) -> None:
        with suppress(OSError):  # being pruned, damaged, or on a file system without locks: it may vanish
            file = open_regular(folder / MANIFEST)
            weakref.finalize(self, file.close)
            # Without waiting: whoever can read a checkpoint can lock it, and one being pruned is gone anyway.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """Yield whether no process holds a checkpoint (see Hold); in the block, no process can."""
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
