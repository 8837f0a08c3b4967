"""How many pairs a study needs to see its effect, and what it costs: ``head-schedules study power``."""

from __future__ import annotations

import math
from statistics import median
from typing import Annotated

from pydantic import Field

from model.declared import PositiveFloat, declared
from model.errors import UserError
from pretrain.study.planned import Study
from pretrain.study.planning import list_parts
from pretrain.study.statistics import paired
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


def power_lines(study: Study, question: Question, pilot: View | None = None) -> list[str]:
    """Plan the size of *study*: what ``power`` prints.

    Args:
        pilot: a study with finished runs by the measure of *study*, where spread (unless it is stated) and
            speed are from.

    Raises:
        UserError: neither a pilot nor a stated spread, a pilot with too few finished pairs, or a study
            without a baseline, whose contrasts are those of a linear model of all runs.
    """
    if study.design:
        raise UserError(
            f"study: {study.name} has no baseline, and so no pairs to count: its report has the intervals of "
            "effects, from all runs together; give a study with a baseline"
        )
    groups, notes = pilot_differences(pilot) if pilot else ([], [])
    count, sd, source = sum(map(len, groups)), question.sd, "as stated"
    if sd is None:
        sd, folder = paired.pooled_sd(groups), pilot.study.folder if pilot else ""
        variants = sum(map(bool, groups))
        source = f"from {count} pairs of {variants} variant{'s' * (variants != 1)} in {folder}"
        if math.isnan(sd):
            given = f"{str(folder)!r} with {count} finished pairs" if pilot else "none"
            raise UserError(
                f"pilot: {given} is not valid; give the folder of a study in which a variant and its "
                f"baseline have two or more seeds finished ({study.file.measure}), or --sd"
            )
    rate = speed(pilot) if pilot else None
    flops = [planned.flops for planned in study.runs]
    tuning = sum(planned.flops for part in list_parts(study)[:-1] for planned in part.runs)
    effect = study.file.effect if question.effect is None else question.effect
    needed = None if effect is None else paired.pairs_needed(effect, sd, question.power)
    test = f"with a power of {question.power:.0%}, by a two-sided paired t-test at 5 %"
    costs = " to ".join(dict.fromkeys(f"{end(flops):.2e}" for end in (min, max)))
    growing = any(planned.run.growth.active for planned in study.runs)
    bound = "; runs grow, so this is an upper bound: the largest model they may become" if growing else ""
    lines = [f"spread   sd {sd:.3g} of paired differences of {study.file.measure}, {source}"]
    unknown = "needed   not known: the study names no effect; give --effect"
    lines.append(unknown if effect is None else f"needed   {_count(needed)} seeds to find {effect:g} {test}")
    for label, seeds in (("", needed), ("study", len(study.file.seeds))):
        if seeds is not None:
            found = paired.detectable_effect(sd, seeds, question.power)
            total = sum(flops) * seeds / len(study.file.seeds) + tuning
            time = f", {human_seconds(total / rate)} of training at the pilot's speed" if rate else ""
            finds = f"{seeds:,} seeds find {found:.3g}, and cost"
            finds = finds if seeds > 1 else "1 seed has no spread, so it finds no effect, and costs"
            lines.append(f"{label:<8} {finds} {total:.2e} FLOPs{time}")
    pilots = f", {tuning:.2e} for all pilots" if tuning else ""
    lines.append(f"cost     {costs} FLOPs a run{pilots}{bound}")
    if pilot and question.sd is None:
        lines += contrast_lines(study, pilot, effect, question.power)
    return [*lines, *(f"note     {note}" for note in notes)]


def _count(seeds: int | None) -> str:
    """What pairs_needed returns, in words."""
    return f"more than {paired.MOST_PAIRS:,}" if seeds is None else f"{seeds:,}"


def contrast_lines(study: Study, pilot: View, effect: float | None, power: float) -> list[str]:
    """The seeds that each contrast of *study* needs, by the spread of that contrast in the pilot.

    Left out are contrasts of variants that the pilot lacks, or of which it has fewer than two finite values,
    and those whose seeds differ between variants.
    """
    lines, trained = [], {summary.variant for summary in pilot.summaries}
    for contrast in study.contrasts:
        found = pilot.evaluate(contrast) if contrast.weights.keys() <= trained else None
        if found is None or found.values.interval is None or found.other_seeds:
            continue
        sd = paired.sd_of(found.values.values())
        line = f"contrast {contrast.name}: sd {sd:.3g} of {len(found.values)} seeds"
        if effect is not None:
            line += f", {_count(paired.pairs_needed(effect, sd, power))} seeds to find {effect:g}"
        lines.append(line)
    return lines


def pilot_differences(pilot: View) -> tuple[list[list[float]], list[str]]:
    """The paired differences of each variant of a pilot, and what was left out: sentences without their full
    stop.

    Variants that train with other seeds than what they are compared with are left out: their pairs have
    nothing in common.
    """
    groups, notes = [], []
    for summary in pilot.compared:
        if summary.other_seeds:
            control = summary.definition.control
            notes.append(f"{summary.variant} is not in the spread: its seeds are not those of {control}")
            continue
        groups.append([value for value in summary.differences.values() if math.isfinite(value)])
        if lost := len(summary.differences) - len(groups[-1]):
            notes.append(f"{summary.variant}: {lost} pairs left out: not finite numbers")
    return groups, notes


def speed(pilot: View) -> float | None:
    """The median FLOP/s of a pilot's runs, without those that grow: they take fewer FLOPs than planned."""
    found = [
        run.planned.flops * run.step / run.planned.run.steps / run.rows[-1]["seconds"]
        for run in pilot.results
        if run.rows and not run.planned.run.growth.active and run.rows[-1].get("seconds", 0) > 0
    ]
    return median(found) if found else None
