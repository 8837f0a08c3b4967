"""Pairs a study's runs: the difference of two variants on one seed, which is what a study compares."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.study.contrasts import Contrast
from pretrain.study.results import RunResult
from pretrain.study.statistics import mean_of
from pretrain.study.study_file import Comparison, Study


def runs_of(results: Sequence[RunResult], comparison: Comparison, variant: str) -> dict[int, RunResult]:
    """The runs of one variant by the study's seed, in the order of *results*, finished or not."""
    return {
        result.seed: result
        for result in results
        if result.comparison == comparison.name and result.variant == variant
    }


def baseline_of(
    results: Sequence[RunResult], comparison: Comparison, variant: str | None = None
) -> dict[int, RunResult]:
    """The runs of the comparison's baseline by the study's seed, finished or not.

    With *variant* the runs that this one is compared with, which may be another than the baseline's.
    """
    name = comparison.baseline if variant is None else comparison.baseline_of(variant)
    return runs_of(results, comparison, name)


def paired_differences(
    results: Sequence[RunResult], comparison: Comparison, variant: str, measure: str, last: int
) -> dict[int, float]:
    """The variant's result less that of its baseline, by the study's seed, in the order of *results*.

    The baseline is the variant that this one is compared with: the comparison's, unless it names another. A
    seed is left out unless both of its runs are finished and have the *last* values of *measure*, of which
    the result is the mean. Runs of two of the study's seeds are never paired.
    """
    return differences(
        values_of(runs_of(results, comparison, variant), measure, last),
        values_of(baseline_of(results, comparison, variant), measure, last),
    )


def values_of(runs: dict[int, RunResult], measure: str, last: int) -> dict[int, float]:
    """The result of each run that is finished, by seed; those without one are left out."""
    found = {seed: run.result(measure, last) for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def differences(values: dict[int, float], baseline: dict[int, float]) -> dict[int, float]:
    """*values* less *baseline*, by the seeds that both have."""
    return {seed: value - baseline[seed] for seed, value in values.items() if seed in baseline}


def in_common(runs: dict[int, RunResult], baseline: dict[int, RunResult]) -> bool:
    """Whether the pairs trained with the same seed, so with the same data in the same order.

    Runs of a variant with a seed_shift did not: they are paired by their place in the study alone, and differ
    by as much as any two runs do.
    """
    both = runs.keys() & baseline.keys()
    return all(runs[seed].planned.run.seed == baseline[seed].planned.run.seed for seed in both)


def contrast_values(
    results: Sequence[RunResult], study: Study, contrast: Contrast, measure: str, last: int
) -> dict[int, float]:
    """The mean of plus less the mean of minus, for every seed of which all runs have a result."""
    sides = [
        [
            values_of(runs_of(results, study.comparison(name), variant), measure, last)
            for name, variant in side
        ]
        for side in (contrast.plus, contrast.minus)
    ]
    return {
        seed: mean_of(each[seed] for each in sides[0]) - mean_of(each[seed] for each in sides[1])
        for seed in study.seeds
        if all(seed in each for side in sides for each in side)
    }
