"""Picture of heads per layer over the training of runs whose heads grow, a panel for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pretrain.study.costs import History, head_history
from pretrain.study.report.panels import line_style, move, panels, set_labels, set_title
from pretrain.study.summaries import View
from pretrain.utils.plotting import whole_numbers


def draw_growing_heads(view: View, path: Path) -> str:
    """Draw the heads of each layer over steps: thick the mean over the seeds, thin each run.

    Without its checkpoint a run's model is not known, and it is left out.
    """
    growing = [summary for summary in view.every if summary.grows]
    histories = [[found for run in summary.finished if (found := head_history(run))] for summary in growing]
    shown = [(summary, runs) for summary, runs in zip(growing, histories, strict=True) if runs]
    if not shown:
        return "no finished run has heads that grow"
    with panels(path, len(shown)) as axes:
        for axis, (summary, runs) in zip(axes, shown, strict=True):
            set_title(axis, [summary], summary.label, [len(runs)], "seed")
            means = mean_heads(runs)
            for layer in means:
                style = line_style(layer, len(means.columns)) | {"marker": "", "drawstyle": "steps-post"}
                drawn = axis.plot(means[layer], label=f"layer {layer}", **style)
                for history in runs:
                    counts = [heads[layer] for _, heads in history]
                    thin = style | {"linewidth": 0.5, "alpha": 0.6}
                    drawn += axis.plot([step for step, _ in history], counts, **thin)
                move(drawn, layer, len(means.columns), up=1.6)
            axis.set_ylim(bottom=0)
            set_labels(axis, "training step", "heads of the layer")
            whole_numbers(axis.yaxis)
    return ""


def mean_heads(runs: Sequence[History]) -> pd.DataFrame:
    """Mean head count over the *runs* by step and layer, at every step at which one of them shows heads."""
    frames = [pd.DataFrame.from_dict(dict(history), orient="index") for history in runs]
    steps = sorted(set().union(*(frame.index for frame in frames)))
    return sum(frame.reindex(steps, method="ffill") for frame in frames) / len(frames)
