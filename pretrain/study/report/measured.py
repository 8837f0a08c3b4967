"""Pictures of what else was measured: attention distance by layer, and zero-shot scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.study.report.figures import EVALUATION, by_place, distance_differences, distances, score_keys
from pretrain.study.report.panels import (
    band,
    line_styles,
    over_pairs,
    over_seeds,
    panels,
    set_labels,
    variant_rows,
)
from pretrain.study.summaries import Summary, View, values_of


def draw_distances(view: View, path: Path) -> str:
    """Draw attention distance by layer, and beside it less the baseline's (arXiv 2606.27449, figure 4)."""
    shown = [
        summaries
        for summaries in view.summaries.values()
        if any(distances(run)[1] for summary in summaries for run in summary.finished)
    ]
    if not shown:
        return "no finished run has measured attention distance (diagnostics_every)"
    styles = line_styles(view)
    with panels(path, 2 * len(shown), columns=2 if len(shown) < 4 else 4) as axes:
        for summaries, absolute, relative in zip(shown, axes[::2], axes[1::2], strict=True):
            relative.axhline(0, color="gray", linewidth=0.8)
            for place, summary in enumerate(summaries):
                measured = by_place([found for run in summary.finished if (found := distances(run)[1])])
                for axis, points in ((absolute, measured), (relative, distance_differences(summary))):
                    if points:
                        style = styles[summary.variant] | {"label": summary.label}
                        band(axis, points, place, len(summaries), each=True, **style)
            set_labels(absolute, "layer", "attention distance D (tokens)")
            set_labels(relative, "layer", "ΔD (tokens)")
            over_seeds(absolute, summaries, "attention distance ± sd")
            over_pairs(relative, summaries, "less the baseline's")
    return ""


def draw_scores(view: View, path: Path) -> str:
    """Draw zero-shot scores as bars with their standard deviation over seeds (arXiv 2606.27449, figure 2)."""
    shown = [(summaries, key) for summaries in view.summaries.values() for key in score_keys(summaries)]
    if not shown:
        return "no finished run has measured zero-shot scores (evaluation.every)"
    height = 0.9 + 0.32 * max(map(len, view.summaries.values()))
    with panels(path, len(shown), columns=min(3, len(shown)), height=height) as axes:
        for axis, (summaries, key) in zip(axes, shown, strict=True):
            _scores(axis, summaries, key)
    return ""


def _scores(axis: Any, summaries: Sequence[Summary], key: str) -> None:
    """Fill a panel with a bar for each variant that has the score, and its value."""
    largest = 0.0
    for place, summary in enumerate(summaries):
        values = values_of(summary.runs, key)
        if values.mean is None:
            continue
        mean, sd = values.mean, values.sd or 0.0
        style = {"color": "black" if summary.is_baseline else "gray", "alpha": 0.55}
        axis.barh([place], [mean], xerr=[sd] if sd else None, height=0.65, capsize=2, **style)
        axis.text(mean + sd, place, f"  {mean:.{4 if mean < 1 else 2}f}", va="center", fontsize="x-small")
        largest = max(largest, mean + sd) if math.isfinite(mean) else largest
    axis.set_xlim(0, 1.22 * largest or 1)
    variant_rows(axis, [summary.label for summary in summaries])
    task, _, metric = key.removeprefix(EVALUATION).partition("/")
    over_seeds(axis, summaries, task)
    set_labels(axis, f"{metric} (lm-eval)", "")
