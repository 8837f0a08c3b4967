"""Settings and names of variants, as study files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.errors import UserError
from pretrain.config.run_config import is_folder_name
from pretrain.config.sources import flatten

Settings = dict[str, Any]
OF_A_VARIANT = ("seed_shift", "against", "rates")
"""What a variant has beside settings."""


def read_settings(values: Mapping[str, Any] | None, where: str) -> Settings:
    """The settings of one place of a study file by their dotted names.

    Raises:
        UserError: as ``flatten``; it names the place.
    """
    try:
        return flatten(values or {})
    except UserError as error:
        raise UserError(f"study: {where}: {error}") from None


def label(value: Any) -> str:
    """A value as part of a run's name."""
    return f"{value:g}" if type(value) is float else str(value)


def is_name_part(name: str) -> bool:
    """Whether *name* can be part of a folder's name, without spaces."""
    return is_folder_name(name) and " " not in name
