"""The numbers that a field of a configuration may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any

from model.declared import LARGEST_INTEGER
from model.errors import UserError, shown
from pretrain.utils.parsing import is_finite


def ranged(default: Any, is_valid: Callable[[Any], bool], words: str) -> Any:
    """A dataclass field with the numbers that it may hold; *words* say which they are. None is always valid."""
    return field(default=default, metadata={"is_valid": is_valid, "words": words})


def positive(default: float | None) -> Any:
    """A dataclass field that holds a number above 0."""
    return ranged(default, lambda value: value > 0, "a positive number")


def from_zero(default: float | None) -> Any:
    """A dataclass field that holds 0 or a number above it."""
    return ranged(default, lambda value: value >= 0, "zero or a positive number")


def check_numbers(section: Any, prefix: str = "") -> None:
    """Check every number of a configuration and of the sections in it.

    Raises:
        UserError: a number is not finite or out of its field's range.
    """
    for item in dataclasses.fields(section):
        name, value = prefix + item.name, getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            check_numbers(value, f"{name}.")
        elif isinstance(value, int | float):
            if not is_finite(value):
                raise UserError(
                    f"{name}: {shown(value)} is not valid; give a finite number of at most {LARGEST_INTEGER:.1e}"
                )
            if "is_valid" in item.metadata and not item.metadata["is_valid"](value):
                raise UserError(f"{name}: {value} is not valid; give {item.metadata['words']}")
