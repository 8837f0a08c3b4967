"""A model that a user names: a preset, or a JSON file of its fields."""

from __future__ import annotations

from pathlib import Path

from model.config import ModelConfig
from model.presets import preset
from pretrain.utils.parsing import read_json


def named_model(name: str) -> ModelConfig:
    """A preset, or the configuration in a ``.json`` file. Raises UserError for an unknown name and a bad
    file."""
    if not name.endswith(".json"):
        return preset(name)
    return ModelConfig.from_json(read_json(Path(name), "model"), f"model: {name}")
