"""Pictures of what else was measured: attention distance by layer, and zero-shot scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.study.paired import values_of
from pretrain.study.report.panels import (
    DPI,
    Panel,
    band,
    layer_axis,
    legend,
    line_styles,
    over_pairs,
    over_seeds,
    set_title,
    short_name,
)
from pretrain.study.report.summaries import (
    EVALUATION,
    Summary,
    View,
    distance_differences,
    distances,
    score_keys,
)
from pretrain.study.statistics import mean_of, sd_of
from pretrain.utils.plotting import saved_figure


def draw_distances(view: View, path: Path) -> str:
    """Draw attention distance by layer, and beside it less the baseline's (arXiv 2606.27449, figure 4)."""
    shown = [
        summaries
        for summaries in view.summaries.values()
        if any(distances(run)[1] for summary in summaries for run in summary.finished)
    ]
    if not shown:
        return "no finished run has measured attention distance (diagnostics_every)"
    styles, beside = line_styles(view), 1 if len(shown) < 4 else 2
    rows = math.ceil(len(shown) / beside)
    size = (9.5 if beside == 1 else 15, 0.8 + 3 * rows)
    with saved_figure(path, "out", rows, 2 * beside, size=size, dpi=DPI, squeeze=False) as (figure, axes):
        panels: list[Panel] = []
        for axis in axes.flat:
            axis.set_axis_off()
        for index, summaries in enumerate(shown):
            row, column = divmod(index, beside)
            pair = axes[row][2 * column : 2 * column + 2]
            panels += [(axis, summaries) for axis in pair]
            _distances(view, pair, summaries, styles)
        legend(figure, panels, "± 1 sd over seeds or pairs")
    return ""


def _distances(
    view: View, pair: Any, summaries: Sequence[Summary], styles: dict[str, dict[str, Any]]
) -> None:
    """Fill two panels: attention distance by layer, and its difference."""
    absolute, relative = pair
    relative.axhline(0, color="gray", linewidth=0.8)
    lines = len(summaries)
    for place, summary in enumerate(summaries):
        measured = [found for run in summary.finished if (found := distances(run)[1])]
        if measured and all(found.keys() == measured[0].keys() for found in measured):
            by_layer = {layer: [found[layer] for found in measured] for layer in measured[0]}
            label = short_name(summary)
            band(absolute, by_layer, place, lines, each=True, label=label, **styles[summary.variant])
        gaps = distance_differences(view, summary)
        if gaps:
            band(relative, gaps, place, lines, each=True, **styles[summary.variant])
    absolute.set_ylabel("attention distance D (tokens)", fontsize="small")
    relative.set_ylabel("ΔD (tokens)", fontsize="small")
    set_title(absolute, over_seeds(summaries, "attention distance"))
    set_title(relative, over_pairs(summaries, "less the baseline's"))
    for axis in pair:
        axis.set_axis_on()
        axis.tick_params(labelsize="small")
        layer_axis(axis)


def draw_scores(view: View, path: Path) -> str:
    """Draw zero-shot scores as bars with their standard deviation over seeds (arXiv 2606.27449, figure 2)."""
    shown = [(summaries, key) for summaries in view.summaries.values() for key in score_keys(summaries)]
    if not shown:
        return "no finished run has measured zero-shot scores (evaluation.every)"
    columns = min(3, max(len(score_keys(summaries)) for summaries in view.summaries.values()))
    rows: list[list[tuple[list[Summary], str]]] = []
    for summaries in view.summaries.values():
        keys = score_keys(summaries)
        rows += [
            [(summaries, key) for key in keys[start : start + columns]]
            for start in range(0, len(keys), columns)
        ]
    heights = [0.32 * len(row[0][0]) + 0.6 for row in rows]
    with saved_figure(
        path, "out", len(rows), columns, size=(1.5 + 3.8 * columns, sum(heights) + 0.6), dpi=DPI, squeeze=False,
        height_ratios=heights,
    ) as (_, axes):  # fmt: skip
        for axis in axes.flat:
            axis.set_axis_off()
        for line, row in zip(axes, rows, strict=True):
            for axis, (summaries, key) in zip(line, row, strict=False):
                axis.set_axis_on()
                _scores(axis, summaries, key, named=axis is line[0])
    return ""


def _scores(axis: Any, summaries: Sequence[Summary], key: str, named: bool) -> None:
    """Fill a panel with a bar for each variant that has the score, and its value."""
    largest = 0.0
    for place, summary in enumerate(summaries):
        values = list(values_of(summary.runs, key, 1).values())
        if not values:
            continue
        mean, sd = mean_of(values), sd_of(values) if len(values) > 1 else 0.0
        style = {"color": "black" if summary.is_baseline else "gray", "alpha": 0.55}
        axis.barh([place], [mean], xerr=[sd] if sd else None, height=0.65, capsize=2, **style)
        axis.text(mean + sd, place, f"  {mean:.{4 if mean < 1 else 2}f}", va="center", fontsize="x-small")
        largest = max(largest, mean + sd) if math.isfinite(mean) else largest
    axis.set_xlim(0, 1.22 * largest or 1)
    axis.set_ylim(len(summaries) - 0.4, -0.6)
    labels = [short_name(summary) for summary in summaries] if named else [""] * len(summaries)
    axis.set_yticks(range(len(summaries)), labels, fontsize="small")
    axis.tick_params(axis="x", labelsize="x-small")
    task, _, metric = key.removeprefix(EVALUATION).partition("/")
    set_title(axis, over_seeds(summaries, task))
    axis.set_xlabel(f"{metric} (lm-eval)", fontsize="x-small")
