"""What the finished runs of a study show: values of each variant and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from pretrain.config.run_config import RunConfig
from pretrain.study.comparable import Comparability
from pretrain.study.paired import baseline_of, differences, in_common, paired_differences, runs_of, values_of
from pretrain.study.report.costs import training_flops
from pretrain.study.results import RunResult, failure
from pretrain.study.statistics import Interval, detectable_effect, mean_of, paired_interval, sd_of
from pretrain.study.study_file import Comparison, Study

OTHER_SEEDS = "other seeds (not paired in data or weights)"
POWER = 0.8
CONFIDENCE = 0.95
MEASURES = {
    "val_loss": ("validation loss", "nats per token"),
    "val_bpb": ("validation loss", "bits per byte"),
    "val_accuracy": ("validation accuracy", "share of examples"),
    "train_loss": ("training loss", "nats per token"),
}
"""What a measure is called, and its unit."""


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

    @property
    def detectable(self) -> float | None:
        """The smallest true mean that so many values with this spread find with a power of 80 %."""
        return detectable_effect(self.interval.sd, len(self), POWER) if self.interval else None

    def numbers(self) -> dict[str, Any]:
        """What the values say as differences, for results.json; what is not known is None."""
        found = self.interval
        return {
            "interval": asdict(found) if found else None,
            "excludes_zero": found.excludes_zero if found else None,
            "detectable_difference": self.detectable,
        }


@dataclass(frozen=True)
class Summary:
    """What the finished runs of one variant show."""

    comparison: Comparison
    variant: str
    runs: dict[int, RunResult]
    """By the study's seed, finished or not."""
    values: Sample
    """The measure of each finished run."""
    differences: Sample
    """Its value less its baseline's of the same seed, for seeds of which both runs are finished."""
    other_seeds: bool
    """Whether the runs trained with other seeds than the baseline's, so that pairs have nothing in common."""

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
        text = self.variant
        if self.is_baseline:
            text += " (baseline)"
        elif self.baseline != self.comparison.baseline:
            text += f" (against {self.baseline})"
        return text + f", {OTHER_SEEDS}" * self.other_seeds

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
        return list(dict.fromkeys(model.heads for model in models)) or [self.first.build_model_config().heads]

    @property
    def first(self) -> RunConfig:
        """The settings of the first seed's run."""
        return next(iter(self.runs.values())).planned.run

    @property
    def grows(self) -> bool:
        """Whether heads are added or removed while the runs train."""
        return self.first.growth.active

    @property
    def when(self) -> str:
        """For runs whose heads change: when the heads and sizes given are theirs."""
        return "" if not self.grows else " (at the end)" if self.values else " (at the start)"

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
class View:
    """A study's results, and which of their figures may be compared."""

    study: Study
    results: Sequence[RunResult]
    comparability: Comparability
    unnamed: Sequence[str] = ()
    """Runs in the study's folder that it does not name."""

    @property
    def measure(self) -> str:
        """What is compared: the study's measure, or bits per byte for losses of several tokenizers."""
        measure = self.study.measure
        return "val_bpb" if self.comparability.bits_per_byte and measure != "val_accuracy" else measure

    @property
    def loss(self) -> str:
        """The validation loss that is followed over tokens."""
        return "val_bpb" if self.comparability.bits_per_byte or self.measure == "val_bpb" else "val_loss"

    @property
    def last(self) -> int:
        """The result of a run is the mean of so many last values."""
        return self.study.last_validations

    @property
    def better(self) -> str:
        """Whether lower or higher values of the measure are better."""
        return "higher" if self.measure == "val_accuracy" else "lower"

    def words(self, measure: str) -> tuple[str, str]:
        """What a measure is called, and its unit."""
        name, unit = MEASURES[measure]
        if self.study.runs[0].run.task == "classification":
            unit = unit.replace("per token", "per example")
        return name, unit

    def described(self, measure: str) -> str:
        """A measure with its unit in parentheses."""
        return "{} ({})".format(*self.words(measure))

    @cached_property
    def summaries(self) -> dict[str, list[Summary]]:
        """The variants of each comparison, in the study's order."""
        return {
            comparison.name: [self._summary(comparison, variant.name) for variant in comparison.variants]
            for comparison in self.study.comparisons
        }

    def _summary(self, comparison: Comparison, variant: str) -> Summary:
        runs, found = runs_of(self.results, comparison, variant), {}
        if comparison.baseline_of(variant) != variant:
            found = paired_differences(self.results, comparison, variant, self.measure, self.last)
        other_seeds = not in_common(runs, baseline_of(self.results, comparison, variant))
        values = values_of(runs, self.measure, self.last)
        return Summary(comparison, variant, runs, Sample(values), Sample(found), other_seeds)

    @property
    def every(self) -> list[Summary]:
        """All variants of all comparisons."""
        return [summary for of_one in self.summaries.values() for summary in of_one]

    @property
    def compared(self) -> list[Summary]:
        """Every variant that is compared with another, and has a pair."""
        return [summary for summary in self.every if summary.differences]

    def pairs(self, summary: Summary) -> dict[int, tuple[RunResult, RunResult]]:
        """The variant's run and its baseline's by seed, finished or not; none for a baseline."""
        if summary.is_baseline:
            return {}
        controls = baseline_of(self.results, summary.comparison, summary.variant)
        return {seed: (run, controls[seed]) for seed, run in summary.runs.items()}

    def difference_of(self, summary: Summary, key: str) -> Sample:
        """The last value of another figure less that of the variant's baseline, of finished runs."""
        own, control = ({seed: pair[side] for seed, pair in self.pairs(summary).items()} for side in (0, 1))
        return Sample(differences(values_of(own, key, 1), values_of(control, key, 1)))

    @staticmethod
    def without_result(summaries: Sequence[Summary]) -> list[str]:
        """What became of every run that has no result, in words."""
        runs = [(run, seed in summary.values) for summary in summaries for seed, run in summary.runs.items()]
        return [_what_became(run) for run, has_result in runs if not has_result]


def _what_became(run: RunResult) -> str:
    """The run's name and how far it is."""
    where = f"at step {run.step:,} of {run.steps:,}"
    reason = failure(run.planned, run.folder.parent)
    words = {
        "missing": "missing",
        "finished": "finished, without so many values of the measure",
        "unfinished": f"unfinished, {where}",
        "failed": f"failed {where}" + (f" ({reason})" if reason else ""),
    }
    return f"{run.planned.name}: {words[run.state]}"
