"""What the finished runs of a study show: values of each variant, paired differences and contrasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import methodcaller
from statistics import median
from typing import Any

from model.errors import UserError
from pretrain.study.comparable import list_values, notes_on, parameters, tokenizer, validation_text
from pretrain.study.contrasts import Contrast, full_name
from pretrain.study.costs import training_flops
from pretrain.study.design.effects import Effects
from pretrain.study.planned import HIGHER_IS_BETTER, Comparison, Study
from pretrain.study.results import RunResult
from pretrain.study.statistics.paired import (
    CONFIDENCE,
    Interval,
    detectable_effect,
    mean_of,
    paired_interval,
    sd_of,
)
from pretrain.study.statistics.ranks import RankInterval, find_behind, signed_rank

POWER = 0.8
MEASURES = {
    "val_loss": "validation loss (nats)",
    "val_bpb": "validation loss (bits per byte)",
    "val_accuracy": "validation accuracy (share of examples)",
    "train_loss": "training loss (nats)",
}
"""What a measure is called, with its unit."""


class Sample(dict[int, float]):
    """Values or differences by the study's seed, for the seeds that have one."""

    @property
    def mean(self) -> float | None:
        """None without a value."""
        return mean_of(self.values()) if self else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation; None for fewer than two values."""
        return sd_of(self.values()) if len(self) > 1 else None

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % t-interval of the mean; None for fewer than two values, or if one is not finite."""
        known = len(self) > 1 and all(map(math.isfinite, self.values()))
        return paired_interval(list(self.values()), CONFIDENCE) if known else None

    @cached_property
    def ranks(self) -> RankInterval | None:
        """The Hodges-Lehmann estimate, its exact interval and test; None as for ``interval``."""
        return signed_rank(list(self.values()), CONFIDENCE) if self.interval else None

    @property
    def detectable(self) -> float | None:
        """The smallest true mean that so many values with this spread find with a power of 80 %."""
        return detectable_effect(self.interval.sd, len(self), POWER) if self.interval else None

    def subtract(self, other: Mapping[int, float]) -> Sample:
        """The differences from *other*, for the seeds that both have."""
        return Sample({seed: value - other[seed] for seed, value in self.items() if seed in other})

    def numbers(self) -> dict[str, Any]:
        """What the values say, for results.json; what is not known is None."""
        found = self.interval
        return {
            "values": self,
            "mean": self.mean,
            "sd": self.sd,
            "interval": asdict(found) if found else None,
            "ranks": asdict(self.ranks) if self.ranks else None,
            "excludes_zero": found.excludes_zero if found else None,
            "detectable_difference": self.detectable,
        }


Runs = Mapping[int, RunResult]
"""Runs of one variant by the study's seed, finished or not."""
Figure = Callable[[RunResult], float | None]


def collect_values(runs: Runs, figure: Figure) -> Sample:
    """A figure of each finished run that has it."""
    found = {seed: figure(run) for seed, run in runs.items() if run.state == "finished"}
    return Sample({seed: value for seed, value in found.items() if value is not None})


def other_seeds(runs: Sequence[Runs]) -> bool:
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    seeds = {seed for each in runs for seed in each}
    return any(len({each[seed].planned.run.seed for each in runs if seed in each}) > 1 for seed in seeds)


@dataclass(frozen=True)
class Summary:
    """What the finished runs of one variant show, paired by seed with those that it is compared with."""

    comparison: Comparison
    variant: str
    runs: Runs
    controls: Runs
    """Of the variant that this one is compared with; none for a baseline."""
    result: Figure
    """What is compared of a run."""

    @cached_property
    def values(self) -> Sample:
        """The result of each finished run."""
        return collect_values(self.runs, self.result)

    @cached_property
    def differences(self) -> Sample:
        """Its result less that of its baseline's run of the same seed, where both are finished."""
        return self.differences_of(self.result)

    def differences_of(self, figure: Figure) -> Sample:
        """The same of another figure."""
        return collect_values(self.runs, figure).subtract(collect_values(self.controls, figure))

    @property
    def pairs(self) -> list[tuple[RunResult, RunResult]]:
        """The runs of ``differences``, each with its baseline's."""
        return [(self.runs[seed], self.controls[seed]) for seed in self.differences]

    @property
    def other_seeds(self) -> bool:
        """Whether runs and controls trained with other seeds, so that pairs have nothing in common."""
        return other_seeds([self.runs, self.controls])

    @property
    def baseline(self) -> str:
        """The variant that this one is compared with; its own name if with none."""
        return self.comparison.baseline_of(self.variant)

    @property
    def is_baseline(self) -> bool:
        """Whether this variant is compared with none."""
        return self.variant == self.baseline

    @property
    def label(self) -> str:
        """The variant's name, and what is special about its differences."""
        own = not self.is_baseline and self.baseline != self.comparison.baseline
        marks = {
            "baseline": self.variant == self.comparison.baseline,
            f"against {self.baseline}": own,
            "other seeds": self.other_seeds,
        }
        special = ", ".join(mark for mark, given in marks.items() if given)
        return f"{self.variant} ({special})" if special else self.variant

    @property
    def finished(self) -> list[RunResult]:
        """The runs that have a result."""
        return [self.runs[seed] for seed in self.values]

    @property
    def schedules(self) -> list[tuple[int, ...]]:
        """The head schedules of the finished runs' models, each once; without a finished run the planned one.

        With growth, runs of several seeds may have found several.
        """
        models = [run.model_config for run in self.finished if run.model_config]
        models = models or [run.planned.run.build_model_config() for run in self.runs.values()]
        return list(dict.fromkeys(model.heads for model in models))

    @property
    def parameters(self) -> list[int]:
        """Parameters of the finished runs' models at their end, each number once."""
        return sorted({run.model_config.num_parameters() for run in self.finished if run.model_config})

    @property
    def training_flops(self) -> list[float]:
        """Training FLOPs of the finished runs, each number once."""
        return sorted({flops for run in self.finished if (flops := training_flops(run)) is not None})

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the finished runs of the median over the later half of a run's rows."""
        later = [run.rows[len(run.rows) // 2 :] for run in self.finished]
        rates = [[row["tokens_per_second"] for row in rows if "tokens_per_second" in row] for rows in later]
        return median(median(each) for each in rates if each) if any(rates) else None


@dataclass(frozen=True)
class Contrasted:
    """A contrast with its value for each seed, in the unit of the view's measure."""

    contrast: Contrast
    values: Sample
    """The mean of plus less the mean of minus, for every seed of the study of which all runs are finished."""
    other_seeds: bool
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    left_out: str = ""
    """Why it has no values, if it could not have any."""


@dataclass(frozen=True)
class View:
    """A study's results, seen by one measure."""

    study: Study
    results: Sequence[RunResult]
    measure: str
    """What is compared."""
    last: int
    """The result of a run is the mean of so many last values."""
    notes: Sequence[str] = ()
    """What to know before comparing: sentences without their full stop."""

    @property
    def loss(self) -> str:
        """The validation loss that is followed over tokens."""
        return "val_bpb" if self.measure == "val_bpb" else "val_loss"

    @property
    def result(self) -> Figure:
        """What is compared of a run."""
        return methodcaller("result", self.measure, self.last)

    @property
    def better(self) -> str:
        """Whether lower or higher values of the measure are better."""
        return "higher" if self.measure in HIGHER_IS_BETTER else "lower"

    def describe_measure(self, measure: str) -> str:
        """A measure with its unit in parentheses."""
        return MEASURES[measure]

    @cached_property
    def summaries(self) -> dict[str, list[Summary]]:
        """The variants of each comparison, in the study's order."""
        runs: dict[tuple[str, str], dict[int, RunResult]] = {}
        for run in self.results:
            planned = run.planned
            runs.setdefault((planned.comparison, planned.variant), {})[planned.seed] = run
        dropped = {each.variant for each in self.study.rungs if not each.kept}
        found: dict[str, list[Summary]] = {}
        for comparison in self.study.comparisons:
            for name in comparison.variants:
                if full_name((comparison.name, name)) in dropped:
                    continue
                against = comparison.baseline_of(name)
                own, controls = (runs.get((comparison.name, each), {}) for each in (name, against))
                controls = {} if against == name else controls
                summary = Summary(comparison, name, own, controls, self.result)
                found.setdefault(comparison.name, []).append(summary)
        return found

    @cached_property
    def effects(self) -> dict[str, Effects]:
        """By comparison that has a design: the analysis of its finished runs."""
        designs = {each.name: each.design for each in self.study.comparisons if each.design is not None}
        return {
            name: Effects(
                design, {each.variant: each.values for each in self.summaries[name]}, self.better == "higher"
            )
            for name, design in designs.items()
        }

    @property
    def listed(self) -> dict[str, list[Summary]]:
        """``summaries`` without those of designs, whose variants are too many to be compared one by one."""
        return {name: each for name, each in self.summaries.items() if name not in self.effects}

    @property
    def every(self) -> list[Summary]:
        """All variants of all comparisons."""
        return [summary for of_one in self.summaries.values() for summary in of_one]

    @property
    def compared(self) -> list[Summary]:
        """Every variant that is compared with another, and has a pair."""
        return [summary for summary in self.every if summary.differences]

    @cached_property
    def contrasted(self) -> list[Contrasted]:
        """Every contrast of the study, in its order."""
        return [self._evaluate_contrast(contrast) for contrast in self.study.contrasts]

    def _evaluate_contrast(self, contrast: Contrast) -> Contrasted:
        runs = {(s.comparison.name, s.variant): s.runs for s in self.every}
        sides = [[runs.get(name, {}) for name in side] for side in (contrast.plus, contrast.minus)]
        every = [*sides[0], *sides[1]]
        results = [run for each in every for run in each.values()]
        differing = list_values(results, validation_text)
        if self.measure in ("val_loss", "train_loss"):
            differing = differing or list_values(results, tokenizer)
        if differing:
            return Contrasted(contrast, Sample(), False, f"several texts or tokenizers: {differing}")
        plus, minus = ([collect_values(each, self.result) for each in side] for side in sides)
        values = {
            seed: mean_of(each[seed] for each in plus) - mean_of(each[seed] for each in minus)
            for seed in self.study.file.seeds
            if all(seed in each for each in (*plus, *minus))
        }
        return Contrasted(contrast, Sample(values), other_seeds(every))

    @cached_property
    def behind(self) -> set[str]:
        """Names of the runs that fell behind the others of their variant; see ranks.fell_behind. In a design,
        whose variants have few runs, behind the robust fit."""
        found = set()
        for name, summaries in self.summaries.items():
            variants = {each.variant: each for each in summaries}
            if name in self.effects:
                behind = self.effects[name].behind
            else:
                values = {variant: each.values for variant, each in variants.items()}
                behind = find_behind(values, self.better == "higher")
            found |= {variants[variant].runs[seed].planned.name for variant, seed in behind}
        return found

    @property
    def caveats(self) -> list[str]:
        """The notes, and why contrasts are left out."""
        left_out = [each for each in self.contrasted if each.left_out]
        return [*self.notes, *(f"contrast {each.contrast.name}: {each.left_out}" for each in left_out)]


def build_view(study: Study, results: Sequence[RunResult]) -> View:
    """The study's results, if they may be compared; in bits per byte for losses of several tokenizers.

    Args:
        results: of load_results.

    Raises:
        UserError: runs of one comparison were validated on different texts.
    """
    measure: str = study.file.measure
    notes = notes_on(results)
    for comparison in study.comparisons:
        label = f"{comparison.name}: " if comparison.name else ""
        runs = [run for run in results if run.planned.comparison == comparison.name]
        if texts := list_values(runs, validation_text):
            raise UserError(
                f"study: {label}runs were validated on different texts: {texts}; give all the same data, or "
                "the same validation.data"
            )
        if sizes := list_values(runs, parameters):
            notes.append(f"{label}the runs differ in the number of parameters: {sizes}")
        if (tokenizers := list_values(runs, tokenizer)) and measure != "val_accuracy":
            measure = "val_bpb"
            notes.append(f"{label}tokenizers differ, so bits per byte are compared: {tokenizers}")
    return View(study, results, measure, study.file.last_validations, notes)
