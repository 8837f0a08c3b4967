"""How many pairs a study needs to see its effect, and what it costs: ``head-schedules study power``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from pydantic import Field

from model.declared import PositiveFloat, declared
from model.errors import UserError
from pretrain.study.planned import Study
from pretrain.study.statistics.paired import MOST_PAIRS, detectable_effect, pairs_needed, pooled_sd
from pretrain.study.summaries import View
from pretrain.utils.format import human_seconds


@declared()
class Question:
    """What ``power`` is asked, besides the study and a pilot."""

    sd: PositiveFloat | None = None
    """Of paired differences, in the unit of the measure; counts in place of a pilot's."""
    effect: PositiveFloat | None = None
    """True difference to be found; None: the study's."""
    power: Annotated[float, Field(gt=0.05, lt=1)] = 0.8
    """Probability to find it with a test at 5 %."""


@dataclass(frozen=True)
class Spread:
    """Standard deviation of paired differences, in the unit of the measure."""

    sd: float
    """Pooled over the variants; NaN for too few pairs."""
    pairs: int = 0
    source: str = "as stated"
    notes: tuple[str, ...] = ()
    """What was left out, a sentence each, without its full stop."""


def power_lines(study: Study, question: Question, pilot: View | None = None) -> list[str]:
    """Plan the size of *study*: what ``power`` prints.

    Args:
        pilot: a study with finished runs by the measure of *study*, where spread (unless it is stated) and
            speed are from.

    Raises:
        UserError: neither a pilot nor a stated spread, or a pilot with too few finished pairs.
    """
    spread = pilot_spread(pilot) if pilot else Spread(math.nan)
    notes = [f"note     {note}" for note in spread.notes]
    if question.sd is not None:
        spread = Spread(question.sd)
    elif math.isnan(spread.sd):
        given = f"{str(pilot.study.folder)!r} with {spread.pairs} finished pairs" if pilot else "none"
        raise UserError(
            f"pilot: {given} is not valid; give the folder of a study in which a variant and its baseline "
            f"have two or more seeds finished ({study.file.measure}), or --sd"
        )
    rate = speed(pilot) if pilot else None
    flops = [planned.flops for planned in study.runs]
    effect = study.file.effect if question.effect is None else question.effect
    needed = pairs_needed(effect or 0.0, spread.sd, question.power)
    test = f"with a power of {question.power:.0%}, by a two-sided paired t-test at 5 %"
    lines = ["needed   not known: the study names no effect; give --effect"]
    if effect is not None:
        count = f"more than {MOST_PAIRS:,}" if needed is None else f"{needed:,}"
        lines = [f"needed   {count} seeds to find {effect:g} {test}"]
    for label, seeds in (("", needed), ("study", len(study.file.seeds))):
        if seeds is not None:
            found = detectable_effect(spread.sd, seeds, question.power)
            total = sum(flops) * seeds / len(study.file.seeds)
            cost = f"{total:.2e} FLOPs" + (f", {human_seconds(total / rate)} as the pilot" if rate else "")
            lines.append(f"{label:<8} {seeds:,} seeds find {found:.3g}, and cost {cost}")
    growing = any(planned.grows for planned in study.runs)
    bound = "; runs grow, so this is an upper bound: the largest model they may become" if growing else ""
    return [
        f"spread   sd {spread.sd:.3g} of paired differences of {study.file.measure}, {spread.source}",
        *lines,
        f"cost     {_range(flops)} FLOPs a run{bound}",
        *notes,
    ]


def pilot_spread(pilot: View) -> Spread:
    """The spread of a pilot's finished pairs over the seeds, pooled over its variants.

    Variants that train with other seeds than what they are compared with are left out: their pairs have
    nothing in common.
    """
    groups: list[list[float]] = []
    notes = []
    for summary in pilot.compared:
        if summary.other_seeds:
            what = f"{summary.variant} is not in the spread"
            notes.append(f"{what}: its seeds are not those of {summary.definition.control}")
            continue
        finite = [value for value in summary.differences.values() if math.isfinite(value)]
        if lost := len(summary.differences) - len(finite):
            notes.append(f"{summary.variant}: {lost} pairs left out: not finite numbers")
        groups.append(finite)
    count, variants = sum(map(len, groups)), sum(map(bool, groups))
    source = f"from {count} pairs of {variants} variants in {pilot.study.folder}"
    return Spread(pooled_sd(groups), count, source, tuple(notes))


def speed(pilot: View) -> float | None:
    """The median FLOP/s of a pilot's runs, without those that grow: they take fewer FLOPs than planned."""
    runs = [run for run in pilot.results if run.rows and not run.planned.grows]
    return median(
        [
            run.planned.flops * run.step / run.planned.run.steps / run.rows[-1]["seconds"]
            for run in runs
            if run.rows[-1].get("seconds", 0) > 0
        ]
        or [0.0]
    )


def _range(flops: Sequence[float]) -> str:
    least, most = min(flops), max(flops)
    return f"{least:.2e}" + (f" to {most:.2e}" if most > least else "")
