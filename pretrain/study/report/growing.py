"""Picture of heads per layer over the training of runs whose heads grow, a panel for each variant."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from pretrain.study.report.panels import (
    comparison_panels,
    counted,
    legend,
    line_style,
    set_title,
    short_name,
    titled,
)
from pretrain.study.report.summaries import History, Summary, View, head_history
from pretrain.study.statistics import mean_of
from pretrain.utils.plotting import whole_numbers

SPREAD = 0.4
"""Heads by which the lines of a panel lie apart in all, so that equal layers do not hide one another."""


def draw_growing_heads(view: View, path: Path) -> str:
    """Draw the heads of each layer over steps: thick the mean over the seeds, thin each run."""
    growing = [s for summaries in view.summaries.values() for s in summaries if s.first.growth.active]
    shown = [(summary, found) for summary in growing if (found := histories(summary))]
    if not shown:
        return "no finished run has heads that grow"
    with comparison_panels(path, [[summary] for summary, _ in shown]) as (figure, panels):
        for (axis, _), (summary, runs) in zip(panels, shown, strict=True):
            set_title(axis, titled([summary], f"{short_name(summary)}, {counted([len(runs)], 'seed')}"))
            means = mean_heads(runs)
            for layer, mean in enumerate(means):
                style = line_style(layer, len(means)) | {"marker": "", "drawstyle": "steps-post"}
                up = SPREAD * ((layer + 0.5) / len(means) - 0.5)
                for history in runs:
                    thin = style | {"linewidth": 0.5, "alpha": 0.6}
                    axis.plot(
                        *zip(*((step, heads[layer] + up) for step, heads in history), strict=True), **thin
                    )
                axis.plot(
                    list(mean), [count + up for count in mean.values()], label=f"layer {layer}", **style
                )
            axis.set_ylim(bottom=0)
            axis.set_xlabel("training step", fontsize="small")
            axis.set_ylabel("heads of the layer", fontsize="small")
            whole_numbers(axis.xaxis)
            whole_numbers(axis.yaxis)
        legend(figure, panels)
    return ""


def histories(summary: Summary) -> list[History]:
    """Steps and heads of each finished run; without its checkpoint a run's model is not known, and it is left out."""
    return [found for run in summary.finished if (found := head_history(run))]


def mean_heads(runs: Sequence[History]) -> list[dict[int, float]]:
    """By layer and step: mean head count over the *runs*, at every step at which one of them shows its heads."""
    steps = sorted({step for history in runs for step, _ in history})
    shown = [[step for step, _ in history] for history in runs]
    at_step = [
        [history[bisect_right(own, step) - 1][1] for own, history in zip(shown, runs, strict=True)]
        for step in steps
    ]
    layers = range(len(runs[0][0][1]))
    return [
        {step: mean_of(heads[layer] for heads in each) for step, each in zip(steps, at_step, strict=True)}
        for layer in layers
    ]
