"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def make_lazy_getattr(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: configurations and most commands need few of its names, and no torch.

    Args:
        places: the module of each public name.
    """

    def attribute(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    return attribute
