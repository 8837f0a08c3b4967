"""A model that a user names: a preset, or a JSON file of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError, quote
from model.presets import preset
from pretrain.config.flag_aliases import suggest_flag
from pretrain.utils.parsing import read_json


def load_named_model(name: str) -> ModelConfig:
    """A preset, or the configuration in a ``.json`` file. Raises UserError for an unknown name and a bad
    file."""
    if not name.endswith(".json"):
        return preset(name)
    values = read_json(Path(name), "model")
    if isinstance(values, dict):
        check_names(values, f"model: {name}: ")
    return ModelConfig.from_json(values, f"model: {name}")


def check_names(values: Mapping[str, Any], where: str, also: Sequence[str] = ()) -> None:
    """Reject a field that neither ModelConfig nor *also* has; the line says what other programs' names mean
    here."""
    known = [f"--architecture.{name}" for name in (*(field.name for field in fields(ModelConfig)), *also)]
    for name in values:
        if f"--architecture.{name}" not in known:
            hint = suggest_flag(str(name), known).replace("--architecture.", "").replace("--", "")
            raise UserError(f"{where}{quote(name, plain=True)}: unknown{hint}")
