"""How much paired differences of finished runs spread over seeds, and what would make them spread less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING

from pretrain.study.contrasts import Contrast
from pretrain.study.paired import (
    baseline_of,
    contrast_values,
    in_common,
    paired_differences,
    runs_of,
    values_of,
)
from pretrain.study.results import RunResult
from pretrain.study.scheduler import planned_flops
from pretrain.study.statistics import pooled_sd, sd_interval, shared_degrees, spread_apart
from pretrain.study.study_file import Comparison, Study

if TYPE_CHECKING:
    from pretrain.study.power.window_losses import WindowVariance

AVERAGES = (1, 2, 3, 5)
"""Of so many last values a run's result may be the mean."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations over the seeds of finished runs, in the unit of the measure; NaN where there are too few."""

    folder: str
    measure: str
    last: int
    """A run's result is the mean of so many last values."""
    differences: dict[str, list[float]]
    """Of each variant and its baseline with the same seed, by variant."""
    sd: float
    """Of paired differences, pooled over the variants."""
    degrees: float
    """Effective degrees of freedom of ``sd``: variants share their baseline's runs."""
    low: float
    """Limits of the 95 % interval of ``sd``."""
    high: float
    averages: dict[int, float]
    """The same with other numbers of last values, of the same pairs."""
    by_comparison: dict[str, tuple[int, float]]
    """In a pilot of several comparisons, pairs and ``sd`` of each: scales or schedules may spread differently."""
    by_contrast: dict[str, tuple[int, float]]
    """Seeds of each contrast, and the standard deviation of its values."""
    apart: tuple[str, ...]
    """Variants whose differences spread more than those of the others (``spread_apart``), the widest first."""
    without_apart: tuple[int, float]
    """Pairs and ``sd`` without these."""
    unpaired: float
    """Of a difference of two runs of two seeds, from the same runs: their variance and their baseline's, added."""
    runs: int
    """Runs that ``unpaired`` is from."""
    other_seeds: dict[str, list[float]]
    """Differences of variants with a seed_shift, whose pairs have nothing in common, by variant."""
    rate: float
    """FLOP/s of a run: median over the runs. Without validation and saving."""
    flops: tuple[float, float] | None
    """Training FLOPs of the smallest and the largest run that has begun, as planned; None if none has."""
    device: str
    """What the runs ran on, as they say."""
    notes: tuple[str, ...] = ()
    windows: WindowVariance | None = None

    @property
    def pairs(self) -> int:
        """Pairs that ``sd`` is from."""
        return sum(map(len, self.differences.values()))

    @property
    def gain(self) -> float:
        """√ of the share of seeds that pairs of one seed need, compared with runs of any: sd / unpaired."""
        return self.sd / self.unpaired if self.unpaired else math.nan

    @property
    def other_sd(self) -> float:
        """Standard deviation of ``other_seeds``, pooled over the variants."""
        return pooled_sd(list(self.other_seeds.values()))

    @property
    def other_pairs(self) -> int:
        """Pairs that it is from."""
        return sum(map(len, self.other_seeds.values()))

    def with_windows(self, windows: WindowVariance | None) -> Spread:
        """The same with what single windows say, and the notes on them."""
        notes = windows.notes if windows else ("no variant has two pairs that read the same windows",)
        return replace(self, windows=windows, notes=self.notes + notes)


def spread_of(
    pilot: Study,
    folder: Path,
    results: Sequence[RunResult],
    measure: str,
    last: int,
    contrasts: Sequence[Contrast] = (),
) -> Spread:
    """Measure the spread of a pilot's runs; comparisons and variants are the pilot's own.

    Args:
        contrasts: of the study that is planned; those that the pilot has the variants of are measured, beside its own.
    """
    notes: list[str] = []
    paired = _differences(pilot, results, measure, last, True, notes)
    averages = {}
    for count in sorted({*AVERAGES, last}):
        groups = _differences(pilot, results, measure, count, True)
        if {name: group.keys() for name, group in groups.items()} == {
            name: group.keys() for name, group in paired.items()
        }:
            averages[count] = pooled_sd([list(group.values()) for group in groups.values()])
    lists = {name: list(group.values()) for name, group in paired.items()}
    by_comparison = {}
    for comparison in pilot.comparisons if len(pilot.comparisons) > 1 else ():
        own = [group for name, group in lists.items() if name.startswith(f"{comparison.name}: ")]
        by_comparison[comparison.name] = (sum(map(len, own)), pooled_sd(own))
    sd = pooled_sd(list(lists.values()))
    apart = spread_apart(lists)
    rest = [group for name, group in lists.items() if name not in apart]
    if apart:
        notes.append(
            f"differences of {', '.join(apart)} spread more than those of other variants (F-test); see the row without"
        )
    degrees = _degrees(pilot, paired)
    low, high = sd_interval(sd, degrees)
    single, runs = _single_runs(pilot, results, measure, last, paired)
    other = _differences(pilot, results, measure, last, False)
    rate, device = _rate(results)
    sizes = [planned_flops(run.planned) for run in results if run.rows]
    return Spread(
        folder=str(folder),
        measure=measure,
        last=last,
        differences=lists,
        sd=sd,
        degrees=degrees,
        low=low,
        high=high,
        averages=averages,
        by_comparison=by_comparison,
        by_contrast=_by_contrast(pilot, results, measure, last, contrasts),
        apart=tuple(apart),
        without_apart=(sum(map(len, rest)), pooled_sd(rest)),
        unpaired=math.sqrt(2) * pooled_sd(single),
        runs=runs,
        other_seeds={name: list(group.values()) for name, group in other.items()},
        rate=rate,
        flops=(min(sizes), max(sizes)) if sizes else None,
        device=device,
        notes=tuple(notes),
    )


def _differences(
    pilot: Study,
    results: Sequence[RunResult],
    measure: str,
    last: int,
    same_seed: bool,
    notes: list[str] | None = None,
) -> dict[str, dict[int, float]]:
    """Finite differences by variant and seed, of variants that do or do not train with their baseline's seeds."""
    found = {}
    for comparison in pilot.comparisons:
        for variant in comparison.variants:
            if comparison.baseline_of(variant.name) == variant.name:
                continue
            runs = runs_of(results, comparison, variant.name)
            baseline = baseline_of(results, comparison, variant.name)
            if in_common(runs, baseline) != same_seed:
                continue
            name = _name(comparison, variant.name)
            values = paired_differences(results, comparison, variant.name, measure, last)
            finite = {seed: value for seed, value in values.items() if math.isfinite(value)}
            if len(finite) < len(values) and notes is not None:
                notes.append(
                    f"{name}: {len(values) - len(finite)} pairs left out, which are not finite numbers"
                )
            if finite:
                found[name] = finite
    return found


def _by_contrast(
    pilot: Study, results: Sequence[RunResult], measure: str, last: int, contrasts: Sequence[Contrast]
) -> dict[str, tuple[int, float]]:
    known = {(comparison.name, v.name) for comparison in pilot.comparisons for v in comparison.variants}
    every = {contrast.name: contrast for contrast in (*pilot.contrasts, *contrasts)}
    found = {}
    for name, contrast in every.items():
        if set(contrast.variants) <= known:
            values = list(contrast_values(results, pilot, contrast, measure, last).values())
            if len(values) > 1 and all(map(math.isfinite, values)):
                found[name] = (len(values), stdev(values))
    return found


def _name(comparison: Comparison, variant: str) -> str:
    return f"{comparison.name}: {variant}" if comparison.name else variant


def _degrees(pilot: Study, paired: Mapping[str, Mapping[int, float]]) -> float:
    """Effective degrees of freedom of all differences: those of the variants that share a baseline, added."""
    counts: dict[tuple[str, str], list[int]] = {}
    for comparison in pilot.comparisons:
        for variant in comparison.variants:
            if group := paired.get(_name(comparison, variant.name)):
                baseline = comparison.name, comparison.baseline_of(variant.name)
                counts.setdefault(baseline, []).append(len(group))
    return sum(map(shared_degrees, counts.values()))


def _single_runs(
    pilot: Study,
    results: Sequence[RunResult],
    measure: str,
    last: int,
    paired: Mapping[str, Mapping[int, float]],
) -> tuple[list[list[float]], int]:
    """Results of the runs that are in *paired*: of each variant, and of its baseline beside it; and how many runs."""
    lists, runs = [], set()
    for comparison in pilot.comparisons:
        for variant in comparison.variants:
            group = paired.get(_name(comparison, variant.name), {})
            for name in (variant.name, comparison.baseline_of(variant.name)):
                values = values_of(runs_of(results, comparison, name), measure, last)
                lists.append([values[seed] for seed in group])
                runs |= {(comparison.name, name, seed) for seed in group}
    return lists, len(runs)


def _rate(results: Sequence[RunResult]) -> tuple[float, str]:
    """Median FLOP/s of the runs and their devices. Runs that grow are left out: they take fewer FLOPs than planned."""
    rates = [
        planned_flops(run.planned) * row["step"] / run.steps / row["seconds"]
        for run in results
        if not run.planned.run.growth.active
        for row in [row for row in run.rows if row.get("seconds", 0) > 0][-1:]
    ]
    devices = dict.fromkeys(str(run.world["device"]) for run in results if run.world.get("device"))
    return (median(rates) if rates else math.nan), " and ".join(devices)
