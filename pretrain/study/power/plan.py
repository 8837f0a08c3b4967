"""How many seeds a study needs to see its effect, what makes it need fewer, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.errors import UserError
from pretrain.study.power.costs import Costs, carry_over_notes, study_costs
from pretrain.study.power.spread import Spread, spread_of
from pretrain.study.results import RunResult, study_of
from pretrain.study.statistics import detectable_effect, pairs_needed
from pretrain.study.study_file import Study

CONFIDENCE = 0.95
LARGER_SETS = (4, 16)
"""Times as many validation windows that are looked at."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Way:
    """One way to compare two variants, with the spread of the differences that it gives."""

    source: str
    """The pilot's folder, or that the spread was stated."""
    name: str
    pairs: int
    """That the spread is from; 0 for a stated one."""
    sd: float
    """Of a difference, in the unit of the measure."""
    ratio: float
    """Of ``sd`` to that of paired last values of the same pilot."""
    needed: int | None
    """Seeds that find the effect; None without an effect, and if there were too many."""
    detectable: float
    """Effect that the planned seeds find."""


@dataclass(frozen=True)
class Size:
    """A number of seeds, what it finds and what it costs."""

    seeds: int
    reasons: tuple[str, ...]
    detectable: float
    flops: float
    hours: float


@dataclass(frozen=True)
class PowerReport:
    """What ``report_lines`` prints. Effects and spreads are in the unit of the measure."""

    study: str
    measure: str
    last: int
    """A run's result is the mean of so many last values."""
    seeds: int
    effect: float | None
    power: float
    sd: float
    sd_low: float
    """Limits of the 95 % interval of ``sd``; NaN for a stated one."""
    sd_high: float
    sd_source: str
    needed: int | None
    """Seeds that find the effect with this power; None without an effect, and if there were too many."""
    needed_low: int | None
    """The same for sd_low and sd_high."""
    needed_high: int | None
    detectable: float
    """Effect that the planned seeds find with this power."""
    ways: tuple[Way, ...]
    sizes: tuple[Size, ...]
    costs: Costs
    pilots: tuple[Spread, ...]
    notes: tuple[str, ...]


def power_report(
    study: Study,
    pilots: Sequence[tuple[Path, list[RunResult]]],
    *,
    sd: float | None,
    effect: float | None,
    target_power: float = 0.8,
    parallel: int = 1,
    windows: int = 0,
    progress: Progress | None = None,
) -> PowerReport:
    """Plan the size of *study*.

    Args:
        pilots: folders of studies and their runs. The spread of the first one counts; every one gets its rows.
        sd: of paired differences; it counts in place of the pilots'.
        effect: true difference that is to be found; the study's by default.
        target_power: probability to find it.
        parallel: runs at a time.
        windows: held-out windows that are measured one by one with the pilots' final models; 0 for none.
        progress: of the windows, for each pilot anew: is called with the number of windows read and that of all.

    Raises:
        UserError: neither a pilot nor *sd*, a pilot with too few finished pairs, numbers that are not valid.
    """
    effect = study.effect if effect is None else effect
    _check(study, pilots, sd, effect, target_power, windows)
    last, seeds = study.last_validations, len(study.seeds)
    spreads = [
        _spread(study, path, results, windows, progress, needed=sd is None) for path, results in pilots
    ]
    low = high = math.nan
    source = "stated"
    if sd is None:
        sd, low, high, source = spreads[0].sd, spreads[0].low, spreads[0].high, spreads[0].folder

    def pairs(spread: float) -> int | None:
        return None if effect is None else pairs_needed(effect, spread, target_power, CONFIDENCE)

    def detected(spread: float, count: int = seeds) -> float:
        return detectable_effect(spread, count, target_power, CONFIDENCE)

    ways = [] if source != "stated" else [Way("stated", "paired", 0, sd, math.nan, pairs(sd), detected(sd))]
    for spread in spreads:
        ways += [
            Way(
                spread.folder,
                name,
                count,
                found,
                found / base if base else math.nan,
                pairs(found),
                detected(found),
            )
            for base in [spread.averages.get(1, spread.sd)]
            for name, count, found in _ways(spread)
        ]
    needed = pairs(sd)
    costs = study_costs(study, spreads, parallel)
    reasons: dict[int, list[str]] = {seeds: ["this study"]}
    if needed is not None:
        reasons.setdefault(needed, []).append("finds the effect")
    if costs.fitting:
        reasons.setdefault(costs.fitting, []).append("fits the budget")
    sizes = [
        Size(count, tuple(why), detected(sd, count), costs.total * count / seeds, costs.hours * count / seeds)
        for count, why in sorted(reasons.items())
    ]
    return PowerReport(
        study=study.name,
        measure=study.measure,
        last=last,
        seeds=seeds,
        effect=effect,
        power=target_power,
        sd=sd,
        sd_low=low,
        sd_high=high,
        sd_source=source,
        needed=needed,
        needed_low=pairs(low),
        needed_high=pairs(high),
        detectable=detected(sd),
        ways=tuple(ways),
        sizes=tuple(sizes),
        costs=costs,
        pilots=tuple(spreads),
        notes=tuple(
            f"{spread.folder}: {note}"
            for spread in spreads
            for note in (*spread.notes, *carry_over_notes(study, spread))
        ),
    )


def _check(
    study: Study,
    pilots: Sequence[object],
    sd: float | None,
    effect: float | None,
    target_power: float,
    windows: int,
) -> None:
    if not pilots and sd is None:
        raise UserError(
            "pilot: none is not valid without --sd; give the folder of a study with finished runs, or the standard "
            "deviation of paired differences"
        )
    for name, value in (("sd", sd), ("effect", effect)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}: {value:g} is not valid; give a number above 0")
    if not 1 - CONFIDENCE < target_power < 1:
        raise UserError(
            f"power: {target_power:g} is not valid; give a number between {1 - CONFIDENCE:.2f} and 1"
        )
    if windows and not pilots:
        raise UserError(
            f"windows: {windows} is not valid without a pilot, whose models read them; give --pilot"
        )
    if windows == 1:
        raise UserError("windows: 1 is not valid; give 2 or more, since their spread is measured")
    if windows and study.measure != "val_loss":
        raise UserError(f"windows: {windows} is not valid with measure {study.measure}; leave it out")


def _spread(
    study: Study,
    path: Path,
    results: list[RunResult],
    windows: int,
    progress: Progress | None,
    needed: bool,
) -> Spread:
    pilot, measure, last = study_of(path), study.measure, study.last_validations
    spread = spread_of(pilot, path, results, measure, last, study.contrasts)
    if needed and math.isnan(spread.sd):
        others = ", besides pairs of other seeds" if spread.other_seeds else ""
        what = f"{measure}, mean of the last {last}" if last > 1 else measure
        raise UserError(
            f"pilot: {str(path)!r} is not valid, with {spread.pairs} finished pairs ({what}){others}; give the folder "
            "of a study in which a variant and its baseline have two or more seeds finished"
        )
    if windows:
        from pretrain.study.power.window_losses import window_variance

        spread = spread.with_windows(window_variance(pilot, results, windows, progress))
    return spread


def _ways(spread: Spread) -> list[tuple[str, int, float]]:
    """Name, pairs (runs, or a contrast's seeds) and spread of each way to compare."""
    ways = [
        (_average(count), spread.pairs, sd) for count, sd in spread.averages.items() if not math.isnan(sd)
    ]
    ways += [
        (f"{_average(spread.last)}, {name}", count, sd)
        for name, (count, sd) in spread.by_comparison.items()
        if not math.isnan(sd)
    ]
    if spread.apart:
        ways.append((f"{_average(spread.last)}, without {', '.join(spread.apart)}", *spread.without_apart))
    if not math.isnan(spread.unpaired):
        ways.append((f"{_average(spread.last)}, any seeds", spread.runs, spread.unpaired))
    if not math.isnan(spread.other_sd):
        ways.append((f"other seeds: {', '.join(spread.other_seeds)}", spread.other_pairs, spread.other_sd))
    ways += [(f"contrast {name}", count, sd) for name, (count, sd) in spread.by_contrast.items()]
    windows, base = spread.windows, spread.averages.get(1)
    if windows and base is not None:
        ways += [
            (
                f"{times} x as many windows ({times * windows.validated:,})",
                spread.pairs,
                windows.sd(base, times),
            )
            for times in LARGER_SETS
        ]
    return ways


def _average(count: int) -> str:
    return "last value" if count == 1 else f"mean of the last {count}"
