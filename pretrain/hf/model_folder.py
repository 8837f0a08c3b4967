"""Looks at a model's folder, a run's or an exported one, before torch is imported."""

from __future__ import annotations

from pathlib import Path

from model.errors import UserError
from pretrain.checkpoint.finder import existing_steps, is_run
from pretrain.hf.weight_files import check_folder


def check_model(folder: str | Path, step: int | None) -> None:
    """Refuse what is neither a run with a checkpoint (of *step*, if one is given) nor an exported folder.

    Raises:
        UserError: as existing_steps and check_folder; a step of an exported folder.
    """
    if is_run(folder):
        existing_steps(folder, step)
        return
    check_folder(folder)
    if step is not None:
        raise UserError(f"step: {step} was given, but {str(folder)!r} is not a run's folder; leave it out")
