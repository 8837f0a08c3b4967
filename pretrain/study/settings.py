"""Settings and names of variants, as study files write them."""

from __future__ import annotations

from typing import Any

from pretrain.config.run_config import is_folder_name

Settings = dict[str, Any]
OF_A_VARIANT = ("seed_shift", "against", "rates")
"""What a variant has beside settings."""


def nested(field: str, value: Any) -> Settings:
    """The settings of a field's name with dots."""
    for part in reversed(field.split(".")):
        value = {part: value}
    settings: Settings = value
    return settings


def label(value: Any) -> str:
    """A value as part of a run's name."""
    return f"{value:g}" if type(value) is float else str(value)


def is_name_part(name: str) -> bool:
    """Whether *name* can be part of a folder's name, without spaces."""
    return is_folder_name(name) and " " not in name
