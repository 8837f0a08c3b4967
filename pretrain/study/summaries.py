"""What the finished runs of a study show: values of each variant, paired differences and contrasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import methodcaller
from typing import TYPE_CHECKING

from model.errors import UserError
from pretrain.study.formulas import Contrast
from pretrain.study.planned import Study, Variant
from pretrain.study.results import RunResult
from pretrain.study.statistics import paired
from pretrain.utils.format import describe_several, shorten_names

if TYPE_CHECKING:
    from pretrain.study.statistics.effects import Effects

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
        return paired.mean_of(self.values()) if self else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation; None for fewer than two values."""
        return paired.sd_of(self.values()) if len(self) > 1 else None

    @cached_property
    def interval(self) -> paired.Estimate | None:
        """The 95 % t-interval of the mean; None for fewer than two values, or if one is not finite."""
        known = len(self) > 1 and all(map(math.isfinite, self.values()))
        return paired.paired_interval(list(self.values())) if known else None

    def subtract(self, other: Mapping[int, float]) -> Sample:
        """The differences from *other*, for the seeds that both have."""
        return Sample({seed: value - other[seed] for seed, value in self.items() if seed in other})


Runs = Mapping[int, RunResult]
"""Runs of one variant by the study's seed, finished or not."""
Metric = Callable[[RunResult], float | None]


def collect_values(runs: Runs, metric: Metric) -> Sample:
    """A metric of each finished run that has it."""
    found = {seed: metric(run) for seed, run in runs.items() if run.state == "finished"}
    return Sample({seed: value for seed, value in found.items() if value is not None})


def other_seeds(runs: Sequence[Runs]) -> bool:
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    seeds = {seed for each in runs for seed in each}
    return any(len({each[seed].planned.run.seed for each in runs if seed in each}) > 1 for seed in seeds)


@dataclass(frozen=True)
class Summary:
    """What the finished runs of one variant show, paired by seed with those that it is compared with."""

    definition: Variant
    runs: Runs
    controls: Runs
    """Of the variant that this one is compared with; none for a baseline."""
    result: Metric
    """What is compared of a run."""

    @cached_property
    def values(self) -> Sample:
        """The result of each finished run."""
        return collect_values(self.runs, self.result)

    @cached_property
    def differences(self) -> Sample:
        """Its result less that of its baseline's run of the same seed, where both are finished."""
        return self.differences_of(self.result)

    def differences_of(self, metric: Metric) -> Sample:
        """The same of another metric."""
        return collect_values(self.runs, metric).subtract(collect_values(self.controls, metric))

    @property
    def other_seeds(self) -> bool:
        """Whether runs and controls trained with other seeds, so that pairs have nothing in common."""
        return other_seeds([self.runs, self.controls])

    @property
    def variant(self) -> str:
        """Its full name."""
        return self.definition.name

    @property
    def label(self) -> str:
        """The variant's name, and what is special about its differences."""
        against, control = self.definition.options.against, self.definition.control
        others = "other seeds" if self.other_seeds else None
        marks = ["baseline" if control is None else None, against and f"against {against}", others]
        special = ", ".join(mark for mark in marks if mark)
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
        return sorted({run.training_flops for run in self.finished if run.training_flops is not None})


@dataclass(frozen=True)
class Contrasted:
    """A contrast with what the finished runs say of it, in the unit of the view's measure."""

    contrast: Contrast
    values: Sample
    """With a baseline: its value for every seed of the study of which all runs are finished."""
    fits: tuple[paired.Estimate, paired.Estimate | None] | None = None
    """Without one: by least squares and by the robust fit."""
    other_seeds: bool = False
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    left_out: str = ""
    """Why it has no values, if it could not have any."""
    adjusted: float | None = None
    """p after Holm's adjustment for the number of the primary contrasts; None for others."""

    @property
    def p(self) -> float | None:
        """Of the two-sided t-test of zero."""
        return self.fits[0].p if self.fits else self.values.interval.p if self.values.interval else None


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
    def result(self) -> Metric:
        """What is compared of a run."""
        return methodcaller("result", self.measure, self.last)

    @property
    def better(self) -> str:
        """Whether lower or higher values of the measure are better."""
        return "higher" if self.measure == "val_accuracy" else "lower"

    @property
    def value(self) -> str:
        """What is compared, with its unit in parentheses."""
        return MEASURES[self.measure]

    @property
    def axis(self) -> str:
        """The same, and which values are better."""
        return f"{self.value}; {self.better} is better"

    @cached_property
    def summaries(self) -> list[Summary]:
        """The variants in the study's order."""
        runs: dict[str, dict[int, RunResult]] = {}
        for run in self.results:
            runs.setdefault(run.planned.variant, {})[run.planned.seed] = run
        return [
            Summary(variant, runs.get(name, {}), runs.get(variant.control or "", {}), self.result)
            for name, variant in self.study.variants.items()
        ]

    @cached_property
    def effects(self) -> Effects | None:
        """The analysis of a study without a baseline."""
        if self.study.design is None:
            return None
        from pretrain.study.statistics.effects import Effects

        values = {each.variant: each.values for each in self.summaries}
        return Effects(self.study.design, values, self.better == "higher")

    @property
    def analysis(self) -> Effects | None:
        """The effects, where the finished runs allow an analysis."""
        return self.effects if self.effects and not self.effects.unknown else None

    @property
    def listed(self) -> list[Summary]:
        """The variants that are compared one by one: none of a design, which has too many."""
        return [] if self.study.design else self.summaries

    @property
    def compared(self) -> list[Summary]:
        """Every variant that is compared with another, and has a pair."""
        return [summary for summary in self.summaries if summary.differences]

    @cached_property
    def contrasted(self) -> list[Contrasted]:
        """Every contrast of the study, in its order."""
        found = [self.evaluate(contrast) for contrast in self.study.contrasts]
        primary = [place for place, each in enumerate(found) if each.contrast.primary]
        if primary:
            from statsmodels.stats.multitest import multipletests

            # One that is not known yet counts all the same.
            ps = [1.0 if found[place].p is None else found[place].p for place in primary]
            for place, p in zip(primary, multipletests(ps, method="holm")[1], strict=True):
                if found[place].p is not None:
                    found[place] = replace(found[place], adjusted=float(p))
        return found

    def evaluate(self, contrast: Contrast) -> Contrasted:
        """What the finished runs say of a contrast."""
        if self.effects is not None:
            fits = self.analysis.contrast(contrast) if self.analysis else None
            return Contrasted(contrast, Sample(), fits)
        runs = {each.variant: each.runs for each in self.summaries if each.variant in contrast.weights}
        results = [run for each in runs.values() for run in each.values()]
        differing = list_values(results, validation_text)
        if self.measure in ("val_loss", "train_loss"):
            differing = differing or list_values(results, tokenizer)
        if differing:
            return Contrasted(contrast, Sample(), left_out=f"several texts or tokenizers: {differing}")
        values = {name: collect_values(each, self.result) for name, each in runs.items()}
        found = {
            seed: sum(weight * values[name][seed] for name, weight in contrast.weights.items())
            for seed in self.study.file.seeds
            if all(seed in each for each in values.values())
        }
        return Contrasted(contrast, Sample(found), other_seeds=other_seeds(list(runs.values())))

    @cached_property
    def outliers(self) -> set[str]:
        """Names of the runs that are worse than the others of their variant by more than FAR robust standard
        deviations; see find_outliers. In a design, whose variants have few runs, than the robust
        fit."""
        runs = {each.variant: each.runs for each in self.summaries}
        if self.effects is not None:
            found = self.effects.outliers
        else:
            values = {each.variant: each.values for each in self.summaries}
            blocks = [{name: values[name] for name in names} for names in group_blocks(self.study)]
            found = [
                each for block in blocks for each in paired.find_outliers(block, self.better == "higher")
            ]
        return {runs[variant][seed].planned.name for variant, seed in found}

    @property
    def caveats(self) -> list[str]:
        """The notes, and why contrasts are left out."""
        left_out = [each for each in self.contrasted if each.left_out]
        return [*self.notes, *(f"contrast {each.contrast.name}: {each.left_out}" for each in left_out)]


def group_blocks(study: Study) -> list[list[str]]:
    """Full names of the variants that are compared with each other, directly or through others; all of a
    study without a baseline."""
    if study.design is not None:
        return [list(study.variants)]
    blocks: dict[str, list[str]] = {}
    for name in study.variants:
        root = name
        for _ in study.variants:
            root = study.variants[root].control or root
        blocks.setdefault(root, []).append(name)
    return list(blocks.values())


# ---------------------------------------------------------------------- what differs besides settings

NOTED: dict[str, Callable[[RunResult], object]] = {
    "context length": lambda run: run.planned.run.build_model_config().context_length,
    "document mask": lambda run: run.planned.run.document_mask,
    "version of the code": lambda run: run.world and ", ".join(run.world.code),
    "kind of device": lambda run: run.world and run.world.device,
    "dtype": lambda run: run.world and run.world.dtype,
    "version of torch": lambda run: run.world and run.world.versions.get("torch"),
}
"""Values that should be one."""


def notes_on(runs: Sequence[RunResult]) -> list[str]:
    """What a reader should know of the runs: sentences without their full stop."""
    notes = [
        f"the runs differ in {what}: {found}"
        for what, value in NOTED.items()
        if (found := list_values(runs, value))
    ]
    lost = [run.planned.name for run in runs if run.state == "finished" and not run.saved]
    if lost:
        notes.append(
            f"finished runs without a checkpoint ({shorten_names(lost)}): their text, tokenizer and code "
            "were not checked"
        )
    return notes


def list_values(runs: Sequence[RunResult], value: Callable[[RunResult], object]) -> str:
    """Values with names of runs; empty for one value. Runs without a checkpoint, or with None, count not."""
    return describe_several(((run.planned.name, value(run)) for run in runs if run.saved), shorten_names)


def tokenizer(run: RunResult) -> str | None:
    """The beginning of its hash."""
    return run.saved.data.tokenizer[:8] if run.saved else None


def parameters(run: RunResult) -> str | None:
    """Of its model; None where heads grow."""
    model = None if run.planned.run.growth.active else run.model_config
    return f"{model.num_parameters():,}" if model else None


def validation_text(run: RunResult) -> str:
    """The corpora whose held-out text a run was measured on (hash and weight), and how many windows."""
    corpora = (run.saved.data.validation or run.saved.data.data or []) if run.saved else []
    named = ", ".join(f"{content[:8]} x {weight}" for content, weight in corpora)
    return f"{run.planned.run.validation.sequences} windows of {named}"


def build_view(study: Study, results: Sequence[RunResult]) -> View:
    """The study's results, if they may be compared; in bits per byte for losses of several tokenizers.

    Args:
        results: of load_results.

    Raises:
        UserError: runs that are compared with each other were validated on different texts.
    """
    measure: str = study.file.measure
    notes = notes_on(results)
    for names in group_blocks(study):
        runs = [run for run in results if run.planned.variant in names]
        if texts := list_values(runs, validation_text):
            valid = "give all the same data, or the same validation.data"
            raise UserError(f"study: runs were validated on different texts: {texts}; {valid}")
        if sizes := list_values(runs, parameters):
            notes.append(f"the runs differ in the number of parameters: {sizes}")
        if (tokenizers := list_values(runs, tokenizer)) and measure != "val_accuracy":
            measure = "val_bpb"
            notes.append(f"tokenizers differ, so bits per byte are compared: {tokenizers}")
    return View(study, results, measure, study.file.last_validations, notes)
