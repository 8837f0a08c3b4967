"""Settings and names of variants, as study files write them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator

from model.errors import UserError, quote
from pretrain.config.run_config import is_folder_name
from pretrain.config.sources import flatten

Settings = dict[str, Any]


def _text(value: Any) -> Any:
    """A number or a truth value as JSON writes it as a key, so that names of variants may be any."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Text = Annotated[str, BeforeValidator(_text)]


def read_settings(values: Mapping[str, Any] | None, where: str) -> Settings:
    """The settings of one place of a study file by their dotted names.

    Raises:
        UserError: as ``flatten``; it names the place.
    """
    try:
        return flatten(values or {})
    except UserError as error:
        raise UserError(f"study: {where}: {error}") from None


def refuse(key: str, value: object, valid: str) -> NoReturn:
    """Raise a UserError about a key of a study file, its value and what would be valid."""
    raise UserError(f"study: {key}: {quote(value)} is not valid; {valid}")


def label(value: Any) -> str:
    """A value as part of a run's name; true, false and null as a study file spells them."""
    if value is None or type(value) is bool:
        return json.dumps(value)
    if isinstance(value, list):
        return ",".join(map(label, value))
    return f"{value:g}" if type(value) is float else str(value)


def is_name_part(name: str) -> bool:
    """Whether *name* can be part of a folder's name, without spaces."""
    return is_folder_name(name) and " " not in name


def read_labels(where: str, values: Collection[Any], most: int = 16) -> list[str]:
    """The labels of levels or tried values, which become parts of folders' names."""
    labels = list(map(label, values))
    if not 2 <= len(set(labels)) == len(labels) <= most or not all(map(is_name_part, labels)):
        valid = "levels, each once, whose texts can be part of a folder's name, without spaces"
        refuse(where, values, f"give from 2 to {most} {valid}")
    return labels
