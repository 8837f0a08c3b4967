"""Picture of heads per layer over the training of runs whose heads grow, a panel for each variant."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from pretrain.study.report.costs import History, head_history
from pretrain.study.report.panels import (
    comparison_panels,
    counted,
    legend,
    line_style,
    move,
    set_labels,
    set_title,
    short_name,
    titled,
)
from pretrain.study.report.summaries import Summary, View
from pretrain.study.statistics import mean_of
from pretrain.utils.plotting import whole_numbers


def draw_growing_heads(view: View, path: Path) -> str:
    """Draw the heads of each layer over steps: thick the mean over the seeds, thin each run."""
    growing = [summary for summary in view.every if summary.grows]
    shown = [(summary, found) for summary in growing if (found := histories(summary))]
    if not shown:
        return "no finished run has heads that grow"
    with comparison_panels(path, [[summary] for summary, _ in shown]) as (figure, panels):
        for (axis, _), (summary, runs) in zip(panels, shown, strict=True):
            set_title(axis, titled([summary], f"{short_name(summary)}, {counted([len(runs)], 'seed')}"))
            means = mean_heads(runs)
            for layer, mean in enumerate(means):
                style = line_style(layer, len(means)) | {"marker": "", "drawstyle": "steps-post"}
                drawn = axis.plot(list(mean), list(mean.values()), label=f"layer {layer}", **style)
                for history in runs:
                    counts = [(step, heads[layer]) for step, heads in history]
                    drawn += axis.plot(*zip(*counts, strict=True), **style | {"linewidth": 0.5, "alpha": 0.6})
                move(drawn, layer, len(means), up=1.6)
            axis.set_ylim(bottom=0)
            set_labels(axis, "training step", "heads of the layer")
            whole_numbers(axis.xaxis)
            whole_numbers(axis.yaxis)
        legend(figure, [axis for axis, _ in panels])
    return ""


def histories(summary: Summary) -> list[History]:
    """Steps and heads of each finished run; without its checkpoint a run's model is not known, and it is left out."""
    return [found for run in summary.finished if (found := head_history(run))]


def mean_heads(runs: Sequence[History]) -> list[dict[int, float]]:
    """By layer and step: mean head count over the *runs*, at every step at which one of them shows its heads."""
    steps = sorted({step for history in runs for step, _ in history})
    shown = [[step for step, _ in history] for history in runs]
    at_step = {
        step: [history[bisect_right(own, step) - 1][1] for own, history in zip(shown, runs, strict=True)]
        for step in steps
    }
    layers = range(len(runs[0][0][1]))
    return [
        {step: mean_of(heads[layer] for heads in each) for step, each in at_step.items()} for layer in layers
    ]
