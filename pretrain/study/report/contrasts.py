"""What the finished runs of a study say about its contrasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretrain.study.comparable import differences_between, different_texts, different_tokenizers
from pretrain.study.contrasts import Contrast, full_name
from pretrain.study.paired import contrast_values, runs_of
from pretrain.study.report.summaries import Sample, View
from pretrain.study.results import some_names


@dataclass(frozen=True)
class Contrasted:
    """A contrast with its value for each seed, in the unit of ``measure``."""

    contrast: Contrast
    measure: str
    """The view's; bits per byte if its own runs have several tokenizers."""
    values: Sample
    """The mean of plus less the mean of minus, for every seed of the study of which all runs are finished."""
    seeds: int
    """How many the study has."""
    other_seeds: bool
    """Whether runs of one of the study's seeds trained with several, so that they have nothing in common."""
    notes: list[str]
    """What to know of runs of several comparisons, a sentence each, without its full stop."""
    left_out: str = ""
    """Why it has no values, if it could not have any."""

    def numbers(self) -> dict[str, Any]:
        """Everything of it for results.json; what is not known is None."""
        return {
            "name": self.contrast.name,
            "plus": [full_name(variant) for variant in self.contrast.plus],
            "minus": [full_name(variant) for variant in self.contrast.minus],
            "measure": self.measure,
            "values": self.values,
            "mean": self.values.mean,
            **self.values.numbers(),
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
    by_seed = [
        runs_of(view.results, view.study.comparison(name), variant) for name, variant in contrast.variants
    ]
    runs = [run for of_variant in by_seed for run in of_variant.values()]
    measure, notes = view.measure, []
    texts = different_texts(runs)
    if texts:
        reason = f"its runs were validated on different texts: {texts}"
        return Contrasted(contrast, measure, Sample(), len(view.study.seeds), False, [], reason)
    if len({name for name, _ in contrast.variants}) > 1:  # of one comparison it has been said
        tokenizers = different_tokenizers(runs)
        if tokenizers:
            measure = measure if measure == "val_accuracy" else "val_bpb"
            notes.append(f"tokenizers differ, so bits per byte are compared: {tokenizers}")
        notes += differences_between(runs)
    values = contrast_values(view.results, view.study, contrast, measure, view.last)
    trained_with = [{each[seed].planned.run.seed for each in by_seed} for seed in view.study.seeds]
    other_seeds = max(map(len, trained_with)) > 1
    return Contrasted(contrast, measure, Sample(values), len(trained_with), other_seeds, notes)
