"""Fuzzing in two sizes: few examples in the quick step, more in the slow one, the same ones every time.

    @given(…)
    def only_user_errors(…): …

    def test_quick(): fixed(only_user_errors)
    @pytest.mark.slow
    def test_slow(): seeded(only_user_errors)

FUZZ_SEED draws other examples in the slow step (a change is not judged by chance), FUZZ_EXAMPLES more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings

# No case may take longer than a minute, whatever the input: a case of 0.3 s took 7.7 s on a busy machine.
OPTIONS: dict[str, Any] = {
    "database": None,
    "deadline": 60_000,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
}


def fixed(test: Callable[..., Any], examples: int = 100) -> None:
    """Run a test made by ``@given`` on the same *examples* every time."""
    _with_settings(test, max_examples=examples, derandomize=True)()


def seeded(test: Callable[..., Any], examples: int = 2000) -> None:
    """Run it on *examples* of FUZZ_SEED, which is printed."""
    number = int(os.environ.get("FUZZ_SEED") or 1)
    count = int(os.environ.get("FUZZ_EXAMPLES") or examples)
    print(f"{count} examples of FUZZ_SEED={number}")
    seed(number)(_with_settings(test, max_examples=count))()


def _with_settings(test: Any, **options: Any) -> Callable[..., Any]:
    # hypothesis rejects a second settings(), as when both sizes run in one process.
    test.__dict__.pop("_hypothesis_internal_settings_applied", None)
    result: Callable[..., Any] = settings(**OPTIONS, **options)(test)
    return result
