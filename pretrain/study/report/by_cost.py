"""Pictures of results by what they cost, for studies whose variants differ in it: training FLOPs and parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pretrain.study.report.panels import (
    SINGLE,
    comparison_panels,
    legend,
    line_styles,
    over_seeds,
    set_title,
    short_name,
)
from pretrain.study.report.summaries import Summary, View, training_flops
from pretrain.study.results import RunResult
from pretrain.study.statistics import mean_of

APART = 1.01
"""Costs that differ by less are taken for one."""


def draw_by_flops(view: View, path: Path) -> str:
    """Draw results over the FLOPs of all training steps, of runs whose heads grow those that they took."""
    return _draw(view, path, training_flops, "training FLOPs")


def draw_by_parameters(view: View, path: Path) -> str:
    """Draw results over the parameters of the model at the end of training."""
    return _draw(view, path, _parameters, "parameters at the end")


def _parameters(run: RunResult) -> float | None:
    return float(run.model_config.num_parameters()) if run.model_config else None


def _draw(view: View, path: Path, cost: Callable[[RunResult], float | None], what: str) -> str:
    """Draw a panel for each comparison whose runs differ in *cost*: circles for runs, a marker for a variant's mean."""
    points = {name: _points(summaries, cost) for name, summaries in view.summaries.items()}
    shown = [
        view.summaries[name]
        for name, of_variants in points.items()
        if (costs := [x for found in of_variants.values() for x, _ in found])
        and max(costs) > APART * min(costs)
    ]
    if not shown:
        return f"in every comparison the finished runs have the same {what}"
    name, unit = view.words(view.measure)
    styles = line_styles(view)
    with comparison_panels(path, shown) as (figure, panels):
        for axis, summaries in panels:
            set_title(axis, over_seeds(summaries, name))
            for summary in summaries:
                found = points[summary.comparison.name].get(summary.variant, [])
                if not found:
                    continue
                style = styles[summary.variant] | {"linestyle": "none"}
                axis.plot(
                    *zip(*found, strict=True), **(SINGLE | {"markersize": 3.5, "color": style["color"]})
                )
                mean = [[mean_of(values)] for values in zip(*found, strict=True)]
                axis.plot(*mean, label=short_name(summary), **(style | {"markersize": 8}))
            axis.set_xlabel(what, fontsize="small")
            axis.set_ylabel(f"{name}\n({unit})", fontsize="small")
        legend(figure, panels, singles="one seed")
    return ""


def _points(
    summaries: list[Summary], cost: Callable[[RunResult], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Cost and result of each finished run, by variant."""
    found: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        for seed, value in summary.values.items():
            spent = cost(summary.runs[seed])
            if spent is not None:
                found.setdefault(summary.variant, []).append((spent, value))
    return found
