"""Pictures of results over what a run has cost: total heads, training FLOPs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pretrain.config.run_config import RunConfig
from pretrain.study.costs import parameters, total_heads, training_flops
from pretrain.study.report.panels import (
    SINGLE,
    line_style,
    line_styles,
    move,
    over_seeds,
    panels,
    set_labels,
)
from pretrain.study.results import RunResult
from pretrain.study.statistics import mean_of
from pretrain.study.study_file import DESCRIBE_A_MODEL, differing_fields
from pretrain.study.summaries import Summary, View

APART = 1.01
"""Costs that differ by less are taken for one."""
ORDERS = ("ascending", "constant", "descending", "mixed")

Points = list[tuple[float, float]]
"""Cost and result of runs."""
Lines = dict[str, tuple[dict[str, Any], list[Points]]]
"""By label: a style, and the groups of runs whose means a line joins."""


def draw_by_flops(view: View, path: Path) -> str:
    """Draw results over the FLOPs of all training steps, of runs whose heads grow those that they took."""
    lines = [_by_variant(view, summaries, training_flops) for summaries in view.summaries.values()]
    return _draw(view, path, "training FLOPs", lines)


def draw_by_parameters(view: View, path: Path) -> str:
    """Draw results over the parameters of the model at the end of training."""
    lines = [_by_variant(view, summaries, parameters) for summaries in view.summaries.values()]
    return _draw(view, path, "parameters at the end", lines)


def draw_by_total_heads(view: View, path: Path) -> str:
    """Draw results over the total number of heads, a line for each order, as in the head-progression note.

    Only variants that differ from the baseline in their heads alone are drawn, and those whose heads grow.
    """
    lines = [_by_order(view, summaries) for summaries in view.summaries.values()]
    return _draw(view, path, "total heads of all layers", lines)


def _by_variant(view: View, summaries: Sequence[Summary], cost: Callable[[RunResult], float | None]) -> Lines:
    """Each variant's runs as one group, whose mean is a large marker."""
    styles, found = line_styles(view), {}
    for summary in summaries:
        if points := _points(summary, cost):
            style = styles[summary.variant] | {"linestyle": "none", "markersize": 8}
            found[summary.label] = (style, [points])
    return found


def _points(summary: Summary, cost: Callable[[RunResult], float | None]) -> Points:
    pairs = [(cost(summary.runs[seed]), value) for seed, value in summary.values.items()]
    return [(spent, value) for spent, value in pairs if spent is not None]


def _by_order(view: View, summaries: Sequence[Summary]) -> Lines:
    """Runs of one order and total as groups, the orders in a fixed order; variants that grow come last."""
    baseline = next(summary for summary in summaries if summary.variant == summary.comparison.baseline)
    totals: dict[str, dict[float, Points]] = {kind: {} for kind in ORDERS}
    for summary in summaries:
        if not summary.grows and not beside_heads(summary.first, baseline.first):
            for point in _points(summary, total_heads):
                totals[order(summary.schedules[0])].setdefault(point[0], []).append(point)
    # In black and grey: grown variants have the colours.
    found: Lines = {
        kind: (line_style(place, 4) | {"color": str(0.2 * place)}, [of for _, of in sorted(groups.items())])
        for place, (kind, groups) in enumerate(totals.items())
        if groups
    }
    if "mixed" in found:
        found["mixed"][0]["linestyle"] = "none"
    return found | _by_variant(view, [summary for summary in summaries if summary.grows], total_heads)


def _draw(view: View, path: Path, cost: str, lines: Sequence[Lines]) -> str:
    """Draw a panel for each comparison whose runs differ in *cost*: circles for runs, markers for means.

    Args:
        lines: of each comparison.
    """
    shown = []
    for summaries, found in zip(view.summaries.values(), lines, strict=True):
        costs = [x for _, groups in found.values() for points in groups for x, _ in points]
        if costs and max(costs) > APART * min(costs):
            shown.append((summaries, found))
    if not shown:
        return f"in every comparison the finished runs have the same {cost}"
    name, unit = view.words(view.measure)
    with panels(path, len(shown)) as axes:
        for axis, (summaries, found) in zip(axes, shown, strict=True):
            over_seeds(axis, summaries, f"{name}, circles: one seed")
            for place, (label, (style, groups)) in enumerate(found.items()):
                means = [[mean_of(values) for values in zip(*points, strict=True)] for points in groups]
                drawn = axis.plot(*zip(*means, strict=True), label=label, **style)
                single = SINGLE | {"markersize": 3.5, "color": style["color"]}
                for points in groups:
                    drawn += axis.plot(*zip(*points, strict=True), **single)
                move(drawn, place, len(found), right=3.0 * (cost == "total heads of all layers"))
            set_labels(axis, cost, name, unit)
    return ""


def order(heads: tuple[int, ...]) -> str:
    """The word of the head-progression note for a schedule: ascending, constant, descending, or mixed."""
    rises = {following > count for count, following in pairwise(heads) if following != count}
    if not rises:
        return "constant"
    return "mixed" if len(rises) > 1 else "ascending" if True in rises else "descending"


def beside_heads(run: RunConfig, baseline: RunConfig) -> list[str]:
    """Fields other than heads in which two runs differ: with any, heads do not explain the difference.

    Two presets may differ in more than their heads, so the models are compared, not their names.
    """
    fields = [key for key in differing_fields(run, baseline) if key.split(".")[0] not in DESCRIBE_A_MODEL]
    model, other = run.build_model_config(), baseline.build_model_config()
    if model.num_layers != other.num_layers:
        return [*fields, "layers"]
    names = [line.partition(":")[0] for line in model.difference(other)]
    return fields + [name for name in names if name != "heads"]
