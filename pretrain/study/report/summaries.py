"""What the finished runs of a study show: values of each variant, paired differences, and what follows from these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from pretrain.config.run_config import RunConfig
from pretrain.diagnostics.comparison import layer_values
from pretrain.study.comparable import Comparability
from pretrain.study.paired import baseline_of, differences, in_common, paired_differences, runs_of, values_of
from pretrain.study.report.schedule_features import Explanation, beside_heads, explain, order
from pretrain.study.results import RunResult, failure
from pretrain.study.statistics import (
    Interval,
    detectable_effect,
    mean_of,
    paired_interval,
    sd_of,
    tokens_to_reach,
)
from pretrain.study.study_file import Comparison, Study

ORDERS = ("ascending", "constant", "descending", "mixed")
SCALES_APART = 1.2
"""Models whose sizes differ by less than this factor are of one scale."""
OTHER_SEEDS = "other seeds (not paired in data or weights)"
EVALUATION = "evaluation/"
DISTANCE = "attention_distance"
POWER = 0.8
CONFIDENCE = 0.95
MEASURES = {
    "val_loss": ("validation loss", "nats per token"),
    "val_bpb": ("validation loss", "bits per byte"),
    "val_accuracy": ("validation accuracy", "share of examples"),
    "train_loss": ("training loss", "nats per token"),
}
"""What a measure is called, and its unit."""

History = list[tuple[int, tuple[int, ...]]]
"""Steps, and the heads of every layer from there on."""


@dataclass(frozen=True)
class Summary:
    """What the finished runs of one variant show."""

    comparison: Comparison
    variant: str
    runs: dict[int, RunResult]
    """By the study's seed, finished or not."""
    values: dict[int, float]
    """The measure of each finished run, by seed."""
    differences: dict[int, float]
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
        marks = ["baseline"] * self.is_baseline
        if self.baseline not in (self.variant, self.comparison.baseline):
            marks.append(f"against {self.baseline}")
        marks = [f"{self.variant} ({marks[0]})" if marks else self.variant]
        return ", ".join(marks + [OTHER_SEEDS] * self.other_seeds)

    @property
    def finished(self) -> list[RunResult]:
        """The runs that have a result."""
        return [self.runs[seed] for seed in self.values]

    @property
    def mean(self) -> float | None:
        """Of the measure over the finished runs."""
        return mean_of(self.values.values()) if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over the finished runs; None for fewer than two."""
        return sd_of(self.values.values()) if len(self.values) > 1 else None

    @property
    def mean_difference(self) -> float | None:
        """Mean of the paired differences; None without a pair."""
        return mean_of(self.differences.values()) if self.differences else None

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % t-interval of the paired differences; None for fewer than two pairs, or if one is not finite."""
        return interval_of(self.differences.values())

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that so many pairs with this spread find with a power of 80 %."""
        found = self.interval
        return detectable_effect(found.sd, found.count, POWER) if found else None

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
    def when(self) -> str:
        """For runs whose heads change: when the heads and sizes given are theirs."""
        if not self.first.growth.active:
            return ""
        return " (at the end)" if self.values else " (at the start)"

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
        rates = [median(later) for run in self.finished if (later := _later_rates(run))]
        return median(rates) if rates else None


def training_flops(run: RunResult) -> float | None:
    """FLOPs of all training steps: FLOPs per token of the model of the time, times tokens; None if it is not known.

    Heads that grow count from the check at which metrics.jsonl shows them.
    """
    model = run.model_config
    rows = [row for row in run.rows if "tokens" in row]
    if model is None or not rows:
        return None
    changes = dict(head_history(run))
    flops, seen = 0.0, 0
    per_token = 0.0
    for step, tokens in ((0, 0), *((row["step"], row["tokens"]) for row in rows)):
        flops += per_token * (tokens - seen)
        seen = tokens
        if step in changes:
            per_token = float(model.replace(heads=changes[step]).flops_per_token())
    return flops


def head_history(run: RunResult) -> History:
    """At step 0, at each check of growth, and at the last row; empty without a checkpoint."""
    model = run.model_config
    if model is None:
        return []
    grows = run.planned.run.growth.active
    found = {0: run.planned.run.build_model_config().heads if grows else model.heads}
    for row in run.rows:
        shown = [row.get(f"growth/heads/layer_{layer}") for layer in range(model.num_layers)]
        counts = [count for count in shown if isinstance(count, int)]
        if len(counts) == model.num_layers:
            found[row["step"]] = tuple(counts)
    return sorted(({run.step: model.heads} | found).items())


def interval_of(values: Iterable[float]) -> Interval | None:
    """The 95 % t-interval of at least two finite differences, else None."""
    numbers = list(values)
    known = len(numbers) > 1 and all(map(math.isfinite, numbers))
    return paired_interval(numbers, CONFIDENCE) if known else None


def _later_rates(run: RunResult) -> list[float]:
    later = run.rows[len(run.rows) // 2 :]
    return [row["tokens_per_second"] for row in later if "tokens_per_second" in row]


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
        return Summary(
            comparison, variant, runs, values_of(runs, self.measure, self.last), found, other_seeds
        )

    @property
    def compared(self) -> list[Summary]:
        """Every variant that is compared with another, and has a pair."""
        return [summary for of_one in self.summaries.values() for summary in of_one if summary.differences]

    def difference_of(self, summary: Summary, key: str) -> dict[int, float]:
        """The last value of another figure less that of the variant's baseline, by seed."""
        others = baseline_of(self.results, summary.comparison, summary.variant)
        return (
            {}
            if summary.is_baseline
            else differences(values_of(summary.runs, key, 1), values_of(others, key, 1))
        )

    @property
    def without_result(self) -> list[str]:
        """What became of every run that has no result, in words."""
        return [
            what_became(run)
            for of_one in self.summaries.values()
            for summary in of_one
            for seed, run in summary.runs.items()
            if seed not in summary.values
        ]


def what_became(run: RunResult) -> str:
    """The run's name and how far it is."""
    where = f"at step {run.step:,} of {run.steps:,}"
    if run.state == "missing":
        return f"{run.planned.name}: missing"
    if run.state == "finished":
        return f"{run.planned.name}: finished, without so many values of the measure"
    if run.state == "unfinished":
        return f"{run.planned.name}: unfinished, {where}"
    reason = failure(run.planned, run.folder.parent)
    return f"{run.planned.name}: failed {where}" + (f" ({reason})" if reason else "")


def tokens_saved(view: View, summary: Summary) -> dict[int, float | None]:
    """The share of the baseline's tokens that a variant does not need to reach the baseline's final loss, by seed.

    Both runs of a pair are followed to the baseline's result; the first time that each gets there counts. None: not
    reached. arXiv 2605.10504 reports 13.2 % fewer tokens so.
    """
    saved: dict[int, float | None] = {}
    if summary.is_baseline:
        return saved
    controls = baseline_of(view.results, summary.comparison, summary.variant)
    for seed, run in summary.runs.items():
        target = controls[seed].result(view.loss, view.last)
        if target is None or run.result(view.loss, view.last) is None:
            continue
        needed = tokens_to_reach(controls[seed].series(view.loss), target)
        own = tokens_to_reach(run.series(view.loss), target)
        if needed:
            saved[seed] = None if own is None else (needed - own) / needed
    return saved


def explanation(view: View, comparison: str) -> tuple[Explanation, list[str]]:
    """The regression of mean Δ on the features of schedules, and the variants that are not in it, with the reason.

    Only variants that differ from the comparison's baseline in their heads alone are in it, and Δ is that from this
    baseline for all of them, so that it has one zero. The baseline is there too, with a Δ of 0.
    """
    summaries = view.summaries[comparison]
    baseline = next(s for s in summaries if s.variant == s.comparison.baseline)
    schedules: dict[str, tuple[int, ...]] = {}
    outcome: dict[str, float] = {}
    left_out = []
    for summary in summaries:
        fields = beside_heads(summary.first, baseline.first)
        paired = differences(summary.values, baseline.values)
        if fields:
            left_out.append(f"{summary.variant} (differs in {', '.join(fields[:3])})")
        elif not paired or not math.isfinite(mean_of(paired.values())):
            left_out.append(f"{summary.variant} (no Δ)")
        else:
            schedules[summary.variant] = summary.schedules[0]
            outcome[summary.variant] = mean_of(paired.values())
    return explain(schedules, outcome), left_out


def gap_over_tokens(view: View, summary: Summary) -> dict[float, list[float]]:
    """The validation loss less the baseline's of the same seed, by tokens: of every pair of finished runs.

    Only token counts at which all pairs were validated are in it.
    """
    controls = baseline_of(view.results, summary.comparison, summary.variant)
    by_pair = []
    for seed in summary.differences:
        control = dict(controls[seed].series(view.loss))
        own = dict(summary.runs[seed].series(view.loss))
        by_pair.append({tokens: own[tokens] - control[tokens] for tokens in own.keys() & control.keys()})
    shared = set.intersection(*map(set, by_pair)) if by_pair else set()
    return {tokens: [gap[tokens] for gap in by_pair] for tokens in sorted(shared)}


def distances(run: RunResult) -> tuple[int, dict[int, float]]:
    """Attention distance by layer in tokens, and the step of the last row that has it; no layer if none has."""
    for row in reversed(run.rows):
        found = layer_values(row, DISTANCE)
        if found:
            return row["step"], dict(sorted(found.items()))
    return 0, {}


def distance_differences(view: View, summary: Summary) -> dict[int, list[float]]:
    """Attention distance less the baseline's by layer, in tokens: of every pair measured at one step.

    This is ΔD of arXiv 2606.27449. Models of another depth have no layers in common with the baseline.
    """
    controls = baseline_of(view.results, summary.comparison, summary.variant)
    by_pair = []
    for seed in summary.differences:
        (step, own), (control_step, control) = distances(summary.runs[seed]), distances(controls[seed])
        if own and step == control_step and own.keys() == control.keys():
            by_pair.append({layer: own[layer] - control[layer] for layer in own})
    if not by_pair or any(pair.keys() != by_pair[0].keys() for pair in by_pair):
        return {}
    return {layer: [pair[layer] for pair in by_pair] for layer in by_pair[0]}


def scales(view: View) -> list[tuple[float, list[str]]]:
    """Sizes of the comparisons' models in parameters, ascending, each with the comparisons of about this size."""
    sizes: dict[str, float] = {}
    for comparison, summaries in view.summaries.items():
        own = [size for summary in summaries for size in summary.parameters]
        if own:
            sizes[comparison] = fmean(own)
    found: list[tuple[float, list[str]]] = []
    for comparison in sorted(sizes, key=lambda name: sizes[name]):
        if found and sizes[comparison] < SCALES_APART * found[-1][0]:
            found[-1][1].append(comparison)
        else:
            found.append((sizes[comparison], [comparison]))
    return found


def total_heads(summaries: Sequence[Summary]) -> dict[str, list[tuple[float, float]]]:
    """Total heads and result of each run, by the order of its heads, or by its variant where heads grow."""
    baseline = next(s for s in summaries if s.variant == s.comparison.baseline)
    found: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        grows = summary.first.growth.active
        if beside_heads(summary.first, baseline.first) and not grows:
            continue
        for seed, value in summary.values.items():
            model = summary.runs[seed].model_config
            if model:
                kind = grown(summary.variant) if grows else order(model.heads)
                found.setdefault(kind, []).append((sum(model.heads), value))
    return dict(
        sorted(found.items(), key=lambda item: ORDERS.index(item[0]) if item[0] in ORDERS else len(ORDERS))
    )


def grown(variant: str) -> str:
    """What total_heads calls a variant whose heads grow."""
    return f"{variant} (grows)"


def score_keys(summaries: Sequence[Summary]) -> list[str]:
    """The keys of the zero-shot scores that a finished run has."""
    return sorted(
        {
            key
            for s in summaries
            for run in s.finished
            for row in run.rows
            for key in row
            if key.startswith(EVALUATION)
        }
    )
