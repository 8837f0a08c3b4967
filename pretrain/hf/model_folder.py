"""Looks at a model's folder, a run's or an exported one, before torch is imported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.checkpoint.finder import checkpoint_path, existing_steps, is_run
from pretrain.utils.parsing import read_json_object


def check_model(folder: str | Path, step: int | None) -> None:
    """Refuse what is neither a run with a checkpoint (of *step*, if one is given) nor an exported folder;
    and a classifier's run.

    Raises:
        UserError: as existing_steps and read_config; a step of an exported folder.
    """
    if is_run(folder):
        newest = existing_steps(folder, step)[-1]
        state: dict[str, Any] = {}
        with suppress(UserError):  # a damaged checkpoint is passed over where it is opened
            state = read_json_object(checkpoint_path(Path(folder), newest) / "state.json", "run")
        model = state.get("model")
        if isinstance(model, dict) and model.get("classes") is not None:
            raise UserError(
                f"run: {str(folder)!r} holds a classifier, which cannot be sampled from or scored; give a "
                "run of --task language"
            )
        return
    read_config(folder)
    if step is not None:
        raise UserError(f"step: {step} was given, but {str(folder)!r} is not a run's folder; leave it out")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of an exported folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        problem = "has no config.json" if Path(folder).is_dir() else "does not exist"
        raise UserError(
            f"model: {str(folder)!r} {problem}; give an exported folder or a run's folder, such as runs/NAME"
        )
    config = read_json_object(path, "model")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"model: {path} does not say its model_type; it is not a model of transformers")
    return config
