"""The picture of heads_or_dim: how much worse each head dim is than the best of its width.

Where the lines of several widths have their minima at one head dim, the head dim decides; where at one head
count, the count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.study.report.pictures import line_style, panel_axes
from pretrain.study.summaries import Sample, Summary, View


@dataclass(frozen=True)
class Point:
    """A model with the same heads in every layer."""

    heads: int
    head_dim: int
    regret: Sample
    """Its result less that of the best model of its group, for each seed."""


def group_models(view: View) -> Iterator[tuple[str, list[Point]]]:
    """The models of each width and level of the first factor, by head dim; only those that have a value for
    every seed of the study."""
    groups: dict[str, list[tuple[int, int, Summary]]] = {}
    for each in view.summaries:
        model = each.runs[view.study.file.seeds[0]].planned.run.build_model_config()
        name = f"{each.definition.levels[0]}, width {model.d_model}"
        if len(each.values) == len(view.study.file.seeds):
            groups.setdefault(name, []).append((model.heads[0], model.layer_head_dim(0), each))
    for name, models in groups.items():
        best = min((each.values for *_, each in models), key=lambda values: values.mean or 0.0)
        points = [Point(heads, dim, each.values.subtract(best)) for heads, dim, each in models]
        yield name, sorted(points, key=lambda point: point.head_dim)


def draw_regret(view: View, path: Path, heading: str) -> bool:
    """Draw regret with 95 % intervals against head dim (left) and number of heads (right), on one scale."""
    groups = list(group_models(view))
    if not groups:
        return False
    with panel_axes(path, ["", ""], columns=2, height=3.6, heading=heading, sharey=True) as axes:
        for axis, field in zip(axes, ("head_dim", "heads"), strict=True):
            for place, (name, points) in enumerate(groups):
                at = [getattr(point, field) for point in points]
                halves = [
                    each.high - each.value if (each := point.regret.interval) else 0.0 for point in points
                ]
                means = [point.regret.mean for point in points]
                axis.errorbar(at, means, yerr=halves, capsize=3, label=name, **line_style(place, len(groups)))
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("head dim" if field == "head_dim" else "heads in each layer")
        axes[0].set_ylabel(f"regret, {view.value}\nlower is better")
    return True
