"""Fuzzing in two sizes: the same few examples in the quick step, more with a random seed in the slow one.

    @given(…)
    def only_user_errors(…): …

    def test_quick(): fixed(only_user_errors)
    @pytest.mark.slow
    def test_slow(): seeded(only_user_errors)

FUZZ_EXAMPLES sets how many examples the slow step takes, FUZZ_SEED repeats one that failed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, seed, settings

# No case may take longer, whatever the input.
DEADLINE = timedelta(seconds=5)
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def fixed(test: Callable[..., Any], examples: int = 100, *, deadline: timedelta | None = DEADLINE) -> None:
    """Run a test made by ``@given`` on the same *examples* every time."""
    settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=deadline,
        suppress_health_check=_CHECKS,
    )(test)()


def seeded(test: Callable[..., Any], examples: int = 2000, *, deadline: timedelta | None = DEADLINE) -> None:
    """Run it on *examples* drawn from a random seed, which is printed."""
    number = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(2**32))
    count = int(os.environ.get("FUZZ_EXAMPLES") or examples)
    print(f"{count} examples of FUZZ_SEED={number}")
    seed(number)(
        settings(max_examples=count, database=None, deadline=deadline, suppress_health_check=_CHECKS)(test)
    )()
