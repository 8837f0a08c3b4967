"""Settings and names of variants, as study files write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator

from model.errors import UserError, quote
from pretrain.config.run_config import is_folder_name
from pretrain.config.sources import flatten
from pretrain.utils.parsing import QUOTE_COMMAS

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
    for key in values or ():
        if key.isdigit():  # of {heads: 2,4,8}
            raise UserError(f"study: {where}: {key}: not the name of a setting{QUOTE_COMMAS}")
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
