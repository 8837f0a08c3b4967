"""Cases for pytest.mark.parametrize that only the slow step takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, each a tuple of arguments or one argument, marked as slow."""
    return [
        pytest.param(*(case if type(case) is tuple else [case]), marks=pytest.mark.slow) for case in cases
    ]
