"""What the finished runs of a study say about its contrasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pretrain.study.comparable import differences_between, different_texts, different_tokenizers
from pretrain.study.contrasts import Contrast, full_name
from pretrain.study.paired import contrast_values, runs_of
from pretrain.study.report.summaries import POWER, View, interval_of
from pretrain.study.results import RunResult, some_names
from pretrain.study.statistics import Interval, detectable_effect, mean_of


@dataclass(frozen=True)
class Contrasted:
    """A contrast with its value for each seed, in the unit of ``measure``."""

    contrast: Contrast
    measure: str
    """The view's; bits per byte if its own runs have several tokenizers."""
    values: dict[int, float]
    """The mean of plus less the mean of minus, for every seed of the study of which all runs are finished."""
    other_seeds: bool
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    notes: list[str]
    """What to know of runs of several comparisons, a sentence each, without its full stop."""
    left_out: str = ""
    """Why it has no values, if it could not have any."""

    @property
    def mean(self) -> float | None:
        """Over the seeds; None without one."""
        return mean_of(self.values.values()) if self.values else None

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % t-interval over the seeds; None for fewer than two, or if a value is not finite."""
        return interval_of(self.values.values())

    @property
    def detectable(self) -> float | None:
        """The smallest true value that so many seeds with this spread find with a power of 80 %."""
        found = self.interval
        return detectable_effect(found.sd, found.count, POWER) if found else None

    def numbers(self) -> dict[str, Any]:
        """Everything of it for results.json; what is not known is None."""
        return {
            "name": self.contrast.name,
            "plus": [full_name(variant) for variant in self.contrast.plus],
            "minus": [full_name(variant) for variant in self.contrast.minus],
            "measure": self.measure,
            "values": self.values,
            "mean": self.mean,
            "interval": asdict(self.interval) if self.interval else None,
            "excludes_zero": self.interval.excludes_zero if self.interval else None,
            "detectable_difference": self.detectable,
            "other_seeds": self.other_seeds,
            "notes": self.notes,
            "left_out": self.left_out or None,
        }


def contrasted(view: View) -> list[Contrasted]:
    """Every contrast of the study, in its order."""
    return [_contrasted(view, contrast) for contrast in view.study.contrasts]


def contrast_notes(view: View) -> list[str]:
    """The notes of all contrasts, each once with the contrasts that it is on."""
    names: dict[str, list[str]] = {}
    for found in contrasted(view):
        for note in found.notes:
            names.setdefault(note, []).append(found.contrast.name)
    return [
        f"contrast{'s' * (len(of_note) > 1)} {some_names(of_note)}: {note}" for note, of_note in names.items()
    ]


def _contrasted(view: View, contrast: Contrast) -> Contrasted:
    plus, minus = (
        [runs_of(view.results, view.study.comparison(name), variant) for name, variant in side]
        for side in (contrast.plus, contrast.minus)
    )
    runs = [run for of_variant in (*plus, *minus) for run in of_variant.values()]
    several = len({name for name, _ in contrast.variants}) > 1  # of one comparison it has been said
    texts = different_texts(runs)
    if texts:
        return Contrasted(
            contrast, view.measure, {}, False, [], f"its runs were validated on different texts: {texts}"
        )
    measure, notes = view.measure, []
    tokenizers = different_tokenizers(runs)
    if several and tokenizers:
        measure = measure if measure == "val_accuracy" else "val_bpb"
        notes.append(f"tokenizers differ, so bits per byte are compared: {tokenizers}")
    if several:
        notes += differences_between(runs)
    values = contrast_values(view.results, view.study, contrast, measure, view.last)
    other_seeds = any(_several_seeds([each[seed] for each in (*plus, *minus)]) for seed in view.study.seeds)
    return Contrasted(contrast, measure, values, other_seeds, notes)


def _several_seeds(runs: Sequence[RunResult]) -> bool:
    return len({run.planned.run.seed for run in runs}) > 1
