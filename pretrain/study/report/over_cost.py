"""Pictures of results over what a run has cost: total heads, training FLOPs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pretrain.config.run_config import RunConfig
from pretrain.study.report.costs import parameters, training_flops
from pretrain.study.report.panels import (
    SINGLE,
    comparison_panels,
    legend,
    line_style,
    line_styles,
    move,
    over_seeds,
    set_labels,
    set_title,
    short_name,
    size_ticks,
)
from pretrain.study.report.summaries import Summary, View
from pretrain.study.results import RunResult
from pretrain.study.statistics import mean_of
from pretrain.study.study_file import differing_fields

APART = 1.01
"""Costs that differ by less are taken for one."""
ORDERS = ("ascending", "constant", "descending", "mixed")
OF_THE_MODEL = ("heads", "model", "architecture")
"""Fields of RunConfig that describe the model."""

Points = list[tuple[float, float]]
"""Cost and result of runs."""
Lines = dict[str, list[Points]]
"""Labels, and the groups of runs whose means a line of this label joins."""


def draw_by_flops(view: View, path: Path) -> str:
    """Draw results over the FLOPs of all training steps, of runs whose heads grow those that they took."""
    lines = [_by_variant(summaries, training_flops) for summaries in view.summaries.values()]
    return _draw(view, path, "training FLOPs", lines, _variant_styles(view))


def draw_by_parameters(view: View, path: Path) -> str:
    """Draw results over the parameters of the model at the end of training."""
    lines = [_by_variant(summaries, parameters) for summaries in view.summaries.values()]
    return _draw(view, path, "parameters at the end", lines, _variant_styles(view))


def draw_by_total_heads(view: View, path: Path) -> str:
    """Draw results over the total number of heads, a line for each order of them (the head-progression note's figure).

    Only variants that differ from the baseline in their heads alone are drawn, and those whose heads grow.
    """
    orders = {kind: line_style(place, len(ORDERS)) for place, kind in enumerate(ORDERS)}
    if any(summary.grows for summary in view.every):
        # Grown variants have the colours: an order's could be one of theirs.
        orders = {kind: orders[kind] | {"color": str(0.2 * place)} for place, kind in enumerate(ORDERS)}
    orders["mixed"]["linestyle"] = "none"
    lines = [_by_order(summaries) for summaries in view.summaries.values()]
    return _draw(view, path, "total heads of all layers", lines, _variant_styles(view) | orders, totals=True)


def _variant_styles(view: View) -> dict[str, dict[str, Any]]:
    """A large marker for each variant, by its label; the colours are those of the other pictures."""
    styles, large = line_styles(view), {"linestyle": "none", "markersize": 8}
    return {short_name(summary): styles[summary.variant] | large for summary in view.every}


def _by_variant(summaries: list[Summary], cost: Callable[[RunResult], float | None]) -> Lines:
    """Each variant's runs as one group."""
    found: Lines = {}
    for summary in summaries:
        pairs = [(cost(summary.runs[seed]), value) for seed, value in summary.values.items()]
        points = [(spent, value) for spent, value in pairs if spent is not None]
        if points:
            found[short_name(summary)] = [points]
    return found


def _by_order(summaries: list[Summary]) -> Lines:
    """Runs of one order and total as groups, the orders in a fixed order; variants that grow come last."""
    baseline = next(s for s in summaries if s.variant == s.comparison.baseline)
    totals: dict[str, dict[float, Points]] = {kind: {} for kind in ORDERS}
    grown: Lines = {}
    for summary in summaries:
        if summary.grows:
            grown |= _by_variant([summary], _total_heads)
        elif not beside_heads(summary.first, baseline.first):
            for seed, value in summary.values.items():
                total = _total_heads(summary.runs[seed])
                if total is not None:
                    group = totals[order(summary.schedules[0])].setdefault(total, [])
                    group.append((total, value))
    fixed = {kind: [groups[total] for total in sorted(groups)] for kind, groups in totals.items() if groups}
    return fixed | grown


def _total_heads(run: RunResult) -> float | None:
    return float(sum(run.model_config.heads)) if run.model_config else None


def _draw(
    view: View,
    path: Path,
    cost: str,
    lines: list[Lines],
    styles: dict[str, dict[str, Any]],
    totals: bool = False,
) -> str:
    """Draw a panel for each comparison whose runs differ in *cost*: circles for runs, markers for groups' means.

    Args:
        lines: of each comparison.
        totals: whether the costs are few numbers, each of which is a tick of a logarithmic axis.
    """
    shown: list[tuple[list[Summary], Lines, list[float]]] = []
    for summaries, found in zip(view.summaries.values(), lines, strict=True):
        costs = sorted({x for groups in found.values() for points in groups for x, _ in points})
        if costs and costs[-1] > APART * costs[0]:
            shown.append((summaries, found, costs))
    if not shown:
        return f"in every comparison the finished runs have the same {cost}"
    name, unit = view.words(view.measure)
    with comparison_panels(path, [summaries for summaries, *_ in shown]) as (figure, panels):
        for (axis, _), (summaries, found, costs) in zip(panels, shown, strict=True):
            set_title(axis, over_seeds(summaries, name))
            set_labels(axis, cost + " (log)" * totals, name, unit)
            if totals:
                axis.set_xscale("log", base=2)
                size_ticks(axis, {total: f"{total:g}" for total in costs})
            for place, (label, groups) in enumerate(found.items()):
                means = [[mean_of(values) for values in zip(*points, strict=True)] for points in groups]
                drawn = axis.plot(*zip(*means, strict=True), label=label, **styles[label])
                single = SINGLE | {"markersize": 3.5, "color": styles[label]["color"]}
                for points in groups:
                    drawn += axis.plot(*zip(*points, strict=True), **single)
                move(drawn, place, len(found), right=3.0 * totals)
        legend(figure, [axis for axis, _ in panels], singles="one seed")
    return ""


def order(heads: tuple[int, ...]) -> str:
    """The word of the head-progression note for a schedule: ascending, constant, descending, or mixed."""
    rises = {following > count for count, following in pairwise(heads) if following != count}
    if not rises:
        return "constant"
    return "mixed" if len(rises) > 1 else "ascending" if True in rises else "descending"


def beside_heads(run: RunConfig, baseline: RunConfig) -> list[str]:
    """Fields other than the head schedule in which two runs differ: with any, heads do not explain the difference.

    Two presets may differ in more than their heads, so the models are compared, not their names.
    """
    fields = [key for key in differing_fields(run, baseline) if key.split(".")[0] not in OF_THE_MODEL]
    model, other = run.build_model_config(), baseline.build_model_config()
    if model.num_layers != other.num_layers:
        return [*fields, "layers"]
    lines = model.difference(other)
    return fields + [name for name in (line.partition(":")[0] for line in lines) if name != "heads"]
