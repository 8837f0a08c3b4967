"""What follows from the metrics of paired runs: gaps over tokens, tokens saved, and diagnostics by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pretrain.diagnostics.comparison import BY_LAYER, TITLES, layer_values
from pretrain.study.results import RunResult
from pretrain.study.statistics import tokens_to_reach
from pretrain.study.summaries import Runs, Sample, Summary, View, values_of

EVALUATION = "evaluation/"
DISTANCE = "attention_distance"


def tokens_saved(view: View, summary: Summary) -> dict[int, float | None]:
    """The share of the baseline's tokens that a variant does not need to reach its final loss, by seed.

    Both runs of a pair are followed to the baseline's result; the first time that each gets there counts.
    None: not reached. arXiv 2605.10504 reports 13.2 % fewer tokens so.
    """
    targets = values_of(summary.controls, view.loss, view.last)
    saved: dict[int, float | None] = {}
    for seed in values_of(summary.runs, view.loss, view.last):
        if seed in targets:
            needed, own = (
                tokens_to_reach(list(runs[seed].series(view.loss).items()), targets[seed])
                for runs in (summary.controls, summary.runs)
            )
            if needed:
                saved[seed] = None if own is None else (needed - own) / needed
    return saved


def gap_over_tokens(view: View, summary: Summary) -> dict[int, list[float]]:
    """The validation loss less the baseline's of the same seed, by tokens: of every pair of finished runs.

    Only token counts at which all pairs were validated are in it.
    """
    return by_place(
        [_gap(run.series(view.loss), control.series(view.loss)) for run, control in summary.pairs]
    )


def distances(run: RunResult) -> tuple[int, dict[int, float]]:
    """Attention distance by layer in tokens, and the step of the last row that has it; else no layer."""
    rows = ((row["step"], layer_values(row, DISTANCE)) for row in reversed(run.rows))
    return next(((step, found) for step, found in rows if found), (0, {}))


def distance_differences(summary: Summary) -> dict[int, list[float]]:
    """Attention distance less the baseline's by layer, in tokens: of every pair measured at one step.

    This is ΔD of arXiv 2606.27449. Models of another depth have no layers in common with the baseline.
    """
    found = []
    for (step, own), (control_step, others) in (map(distances, pair) for pair in summary.pairs):
        if own and step == control_step and own.keys() == others.keys():
            found.append(_gap(own, others))
    return by_place(found)


@dataclass(frozen=True)
class Measured:
    """A figure of one variant besides the measure that the study compares."""

    name: str
    step: int
    """At which it was measured; 0 for a run's last one."""
    summary: Summary
    values: Sample
    """Of the finished runs."""
    differences: Sample
    """Less the baseline's."""


def scores(summaries: Sequence[Summary]) -> Iterator[Measured]:
    """The zero-shot scores of every variant that has them."""
    for key in score_keys(summaries):
        for summary in summaries:
            if values := values_of(summary.runs, key):
                gaps = summary.differences_of(key)
                yield Measured(key.removeprefix(EVALUATION), 0, summary, values, gaps)


def score_keys(summaries: Sequence[Summary]) -> list[str]:
    """The keys of the zero-shot scores that a finished run has."""
    rows = (row for summary in summaries for run in summary.finished for row in run.rows)
    return sorted({key for row in rows for key in row if key.startswith(EVALUATION)})


def halves(summaries: Sequence[Summary]) -> Iterator[Measured]:
    """Means of each diagnostic over the lower half of the layers and over the upper one, early and late.

    That is at the first and the last step at which a finished run measured it.
    """
    rows = [row for summary in summaries for run in summary.finished for row in run.rows]
    for measure in BY_LAYER:
        steps = sorted({row["step"] for row in rows if f"diagnostics/{measure}/layer_0" in row})
        for half in ("lower", "upper"):
            for step in dict.fromkeys(steps[:1] + steps[-1:]):
                for summary in summaries:
                    values, controls = (
                        half_means({seed: runs[seed] for seed in seeds}, measure, step, half == "upper")
                        for runs, seeds in (
                            (summary.runs, summary.values),
                            (summary.controls, summary.differences),
                        )
                    )
                    if values:
                        name = f"{TITLES[measure]}, {half} half"
                        yield Measured(name, step, summary, values, values.less(controls))


def half_means(runs: Runs, measure: str, step: int, upper: bool) -> Sample:
    """Mean of a diagnostic over the upper layers (l of L with 2 l >= L) or the lower ones, by seed.

    Runs without this diagnostic at this step are left out.
    """
    found = Sample()
    for seed, run in runs.items():
        row = next((row for row in run.rows if row["step"] == step), {})
        values = [value for _, value in sorted(layer_values(row, measure).items())]
        middle = (len(values) + 1) // 2
        if len(values) > 1:
            found[seed] = fmean(values[middle:] if upper else values[:middle])
    return found


def by_place(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """The values of several curves at the places that all of them have, in ascending order."""
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {place: [curve[place] for curve in curves] for place in sorted(shared)}


def _gap(own: dict[int, float], control: dict[int, float]) -> dict[int, float]:
    return {place: own[place] - control[place] for place in own.keys() & control.keys()}
