"""Fuzzing in two sizes: the same few examples in the quick step, more with a random seed in the slow one.

    @given(…)
    def only_user_errors(…): …

    def test_quick(): fixed(only_user_errors)
    @pytest.mark.slow
    def test_slow(): seeded(only_user_errors)

FUZZ_EXAMPLES sets how many examples the slow step takes, FUZZ_SEED repeats one that failed.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings

# No case may take longer, whatever the input. Of this process's own time: hypothesis's deadlines are of the
# clock, and a case of 0.3 s took 7.7 s on a busy machine.
MOST_SECONDS = 5
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def fixed(test: Callable[..., Any], examples: int = 100) -> None:
    """Run a test made by ``@given`` on the same *examples* every time."""
    settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=_CHECKS
    )(_timed(test))()


def seeded(test: Callable[..., Any], examples: int = 2000) -> None:
    """Run it on *examples* drawn from a random seed, which is printed."""
    number = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(2**32))
    count = int(os.environ.get("FUZZ_EXAMPLES") or examples)
    print(f"{count} examples of FUZZ_SEED={number}")
    seed(number)(
        settings(max_examples=count, database=None, deadline=None, suppress_health_check=_CHECKS)(
            _timed(test)
        )
    )()


def _timed(test: Any) -> Callable[..., Any]:
    """*test*, which fails where one of its examples takes longer than MOST_SECONDS."""
    handle = test.hypothesis
    if not hasattr(handle.inner_test, "timed"):
        inner = handle.inner_test

        @functools.wraps(inner)
        def body(*arguments: Any, **named: Any) -> None:
            began = time.process_time()
            inner(*arguments, **named)
            seconds = time.process_time() - began
            assert seconds <= MOST_SECONDS, f"this example took {seconds:.1f} s"

        body.timed = True  # type: ignore[attr-defined]
        handle.inner_test = body
    # hypothesis refuses a second settings(), as when both sizes run in one process.
    test.__dict__.pop("_hypothesis_internal_settings_applied", None)
    result: Callable[..., Any] = test
    return result
