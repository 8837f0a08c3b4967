"""The setting of profiling."""

from __future__ import annotations

import re
from typing import Any

from model.declared import declared
from model.errors import UserError, shown
from pretrain.config.section import Section

_STEPS = re.compile(r"(\d{1,12}):(\d{1,12})", re.ASCII)


@declared()
class ProfilingSettings(Section):
    """What profiling adds to RunConfig."""

    profile: str | None = None
    """Steps to trace with torch.profiler, FIRST:LAST, both included, such as 10:12. A trace for each rank is
    written into the run folder's profile/, on a GPU with a snapshot of its memory."""

    @staticmethod
    def check(run: Any) -> None:
        """Refuse what is no range of the run's steps."""
        if run.profile is not None:
            steps_of(run.profile, run.steps)


def steps_of(text: str, steps: int) -> tuple[int, int]:
    """First and last step, counted from 1.

    Raises:
        UserError: it is no range, or not of a run of so many *steps*.
    """
    found = _STEPS.fullmatch(text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"profile: {shown(text)} is not valid; give FIRST:LAST, steps of the run from 1 to {steps:,}, "
            "such as 10:12"
        )
    return first, last
