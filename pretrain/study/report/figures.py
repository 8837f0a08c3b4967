"""What follows from the metrics of paired runs: tokens saved, scores and diagnostics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import methodcaller
from statistics import fmean
from typing import Any

from pretrain.diagnostics.comparison import BY_LAYER, TITLES, layer_values
from pretrain.study.results import RunResult
from pretrain.study.statistics.paired import tokens_to_reach
from pretrain.study.summaries import Figure, Summary, View, collect_values

EVALUATION = "evaluation/"


def tokens_saved(view: View, summary: Summary) -> dict[int, float | None]:
    """The share of the baseline's tokens that a variant does not need to reach its final loss, by seed.

    Both runs of a pair are followed to the baseline's result; the first time that each gets there counts.
    None: not reached. arXiv 2605.10504 reports 13.2 % fewer tokens so.
    """
    targets, finished = (
        collect_values(runs, methodcaller("result", view.loss, view.last))
        for runs in (summary.controls, summary.runs)
    )
    saved: dict[int, float | None] = {}
    for seed in finished.keys() & targets.keys():
        needed, own = (
            tokens_to_reach(list(runs[seed].series(view.loss).items()), targets[seed])
            for runs in (summary.controls, summary.runs)
        )
        if needed:
            saved[seed] = None if own is None else (needed - own) / needed
    return saved


def scores(summaries: Sequence[Summary]) -> Iterator[dict[str, Any]]:
    """A row for each zero-shot score and each variant that has it."""
    for key in sorted({key for row in _rows(summaries) for key in row if key.startswith(EVALUATION)}):
        names = {"task": key.removeprefix(EVALUATION)}
        yield from _collect_measured(summaries, methodcaller("result", key), names)


def halves(summaries: Sequence[Summary]) -> Iterator[dict[str, Any]]:
    """Means of each diagnostic over the lower half of the layers and over the upper one, early and late.

    That is at the first and the last step at which a finished run measured it.
    """
    for measure in BY_LAYER:
        steps = sorted(row["step"] for row in _rows(summaries) if f"diagnostics/{measure}/layer_0" in row)
        for half in ("lower", "upper"):
            for step in dict.fromkeys(steps[:1] + steps[-1:]):
                names = {"figure": f"{TITLES[measure]}, {half} half", "step": step}
                figure = partial(half_mean, measure=measure, step=step, upper=half == "upper")
                yield from _collect_measured(summaries, figure, names)


def half_mean(run: RunResult, measure: str, step: int, upper: bool) -> float | None:
    """Mean of a diagnostic over the upper layers (l of L with 2 l >= L) or the lower; None without."""
    row = next((row for row in run.rows if row["step"] == step), {})
    values = [value for _, value in sorted(layer_values(row, measure).items())]
    middle = (len(values) + 1) // 2
    return fmean(values[middle:] if upper else values[:middle]) if len(values) > 1 else None


def _collect_measured(
    summaries: Sequence[Summary], figure: Figure, names: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for summary in summaries:
        if values := collect_values(summary.runs, figure):
            differences = summary.differences_of(figure)
            yield names | {"variant": summary.label, "values": values, "differences": differences}


def _rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    return [row for summary in summaries for run in summary.finished for row in run.rows]
