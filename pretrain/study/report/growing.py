"""Picture of heads per layer over the training of runs whose heads grow, a panel for each variant."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from model.plotting import whole_numbers
from pretrain.study.report.panels import comparison_panels, counted, legend, line_style, set_title, short_name
from pretrain.study.report.summaries import Summary, View, head_history, mean_of
from pretrain.study.results import RunResult

SPREAD = 0.4
"""Heads by which the lines of a panel lie apart in all, so that equal layers do not hide one another."""


def draw_growing_heads(view: View, path: Path) -> str:
    """Draw the heads of each layer over steps: thick the mean over the seeds, thin each run."""
    shown = [
        [summary]
        for summaries in view.summaries.values()
        for summary in summaries
        if summary.first.growth.active and _known(summary)
    ]
    if not shown:
        return "no finished run has heads that grow"
    with comparison_panels(path, shown) as (figure, panels):
        for axis, [summary] in panels:
            comparison = summary.comparison.name
            name = f"{comparison}: {short_name(summary)}" if comparison else short_name(summary)
            set_title(axis, f"{name}, {counted([len(_known(summary))], 'seed')}")
            means = mean_heads(summary)
            for layer, of_runs in enumerate(means):
                style = line_style(layer, len(means)) | {"marker": "", "drawstyle": "steps-post"}
                up = SPREAD * ((layer + 0.5) / len(means) - 0.5)
                for run in _known(summary):
                    steps, counts = _of_layer(run, layer)
                    thin = style | {"linewidth": 0.5, "alpha": 0.6}
                    axis.plot(steps, [count + up for count in counts], **thin)
                mean = [count + up for count in of_runs.values()]
                axis.plot(list(of_runs), mean, label=f"layer {layer}", **style)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("training step", fontsize="small")
            axis.set_ylabel("heads of the layer", fontsize="small")
            whole_numbers(axis.xaxis)
            whole_numbers(axis.yaxis)
        legend(figure, panels)
    return ""


def mean_heads(summary: Summary) -> list[dict[int, float]]:
    """By layer and step: mean head count over the finished runs, at every step at which one of them shows its heads."""
    layers = summary.first.build_model_config().num_layers
    found = []
    for layer in range(layers):
        of_runs = [_of_layer(run, layer) for run in _known(summary)]
        steps = sorted({step for steps, _ in of_runs for step in steps})
        found.append(
            {step: mean_of(counts[bisect_right(own, step) - 1] for own, counts in of_runs) for step in steps}
        )
    return found


def _known(summary: Summary) -> list[RunResult]:
    """The finished runs whose checkpoint is there: without it, the model is not known."""
    return [run for run in summary.finished if run.model_config]


def _of_layer(run: RunResult, layer: int) -> tuple[list[int], list[int]]:
    """Steps and the layer's heads from there on, from step 0 to the run's last."""
    history = head_history(run)
    return [step for step, _ in history], [heads[layer] for _, heads in history]
