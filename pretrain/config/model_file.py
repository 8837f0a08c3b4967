"""A model that a user names: a preset, a JSON file of its fields, a run's folder or a Hugging Face folder."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError, quote
from model.presets import preset
from pretrain.config.flag_aliases import suggest_flag
from pretrain.config.hf_config_file import read_model
from pretrain.utils.parsing import read_json, read_json_object
from pretrain.utils.run_folder import checkpoint_path, checkpoint_steps, describe_missing_step

SOURCES = "a run's folder (RUN or RUN:STEP) or that of a Hugging Face model"
"""What weights may come from."""


def load_named_model(name: str) -> ModelConfig:
    """A preset, or the configuration in a ``.json`` file. Raises UserError for an unknown name and a bad
    file."""
    if not name.endswith(".json"):
        if "/" in name:
            recipe = "; give a recipe as --config" if name.endswith((".yaml", ".yml")) else ""
            raise UserError(f"model: {quote(name)} is neither a run's folder nor a .json file{recipe}")
        return preset(name)
    values = read_json(Path(name), "model")
    if isinstance(values, dict):
        check_names(values, f"model: {name}: ")
    return ModelConfig.from_json(values, f"model: {name}")


def split_step(name: str) -> tuple[str, int | None]:
    """``runs/NAME:500`` -> ``runs/NAME`` and 500; a name without a step, or of a folder, is itself."""
    found = re.fullmatch(r"(.+):(\d{1,12})", name, re.ASCII)
    if found is None or os.path.isdir(name):  # noqa: PTH112 — no error for a name that is too long
        return name, None
    return found[1], int(found[2])


def load_model(name: str, weights: bool = False) -> ModelConfig:
    """The model of a preset or a file, or the one that the run in a folder has now (of RUN:STEP: had then).

    Args:
        weights: whether the weights are also used; only then may the model be that of a Hugging Face folder.

    Raises:
        UserError: unknown preset, a bad file, a folder that is not a run with a checkpoint.
    """
    text, step = split_step(name)
    folder = Path(text)
    if not os.path.isdir(text):  # noqa: PTH112 — no error for a name that is too long
        if weights and not name.endswith(".json"):
            raise UserError(f"init_from: {quote(name)} is not a folder; give {SOURCES}")
        return load_named_model(name)
    hint = "give the folder of a run that has a checkpoint, such as runs/NAME"
    if (folder / "config.json").exists():
        if weights and step is None:
            return read_model(folder).model
        hint = f"--init_from {shlex.quote(text)} begins a run with its weights"
    steps = checkpoint_steps(folder)
    if not steps:
        raise UserError(f"model: {text} holds no checkpoint; {hint}")
    if step is not None and step not in steps:
        field = "init_from" if weights else "model"
        raise UserError(f"{field}: {describe_missing_step(text, step, steps)}")

    def read(number: int) -> dict[str, Any]:
        return read_json_object(checkpoint_path(folder, number) / "state.json", "model", f"; {hint}")

    oldest, *newer = steps if step is None else [step]
    for number in reversed(newer):
        with suppress(UserError):  # damaged, and passed over as where it is opened
            state = read(number)
            break
    else:
        state = read(oldest)
    return ModelConfig.from_json(state.get("model", {}))


def check_names(values: Mapping[str, Any], where: str, also: Sequence[str] = ()) -> None:
    """Reject a field that neither ModelConfig nor *also* has; the line says what other programs' names mean
    here."""
    known = [f"--architecture.{name}" for name in (*(field.name for field in fields(ModelConfig)), *also)]
    for name in values:
        if f"--architecture.{name}" not in known:
            hint = suggest_flag(str(name), known).replace("--architecture.", "").replace("--", "")
            if name not in also:
                hint = hint.replace(f", with {name} for another depth", "")
            raise UserError(f"{where}{quote(name, plain=True)}: unknown{hint}")
