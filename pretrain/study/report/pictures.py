"""The pictures of a report, a panel for each comparison. Lines differ in style and marker, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.study.contrasts import full_name
from pretrain.study.costs import History, head_history, parameters, total_heads, training_flops
from pretrain.study.pilots.tuning import Tuned
from pretrain.study.report.figures import Curves, by_place, distance_differences, distances, gap_over_tokens
from pretrain.study.results import RunResult
from pretrain.study.statistics.paired import CONFIDENCE, mean_of, paired_interval, sd_of
from pretrain.study.summaries import Summary, View
from pretrain.utils.plotting import count_axis, logarithmic_x, save_figure, whole_numbers

LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "d", ">")
MOST_MARKERS = 12
"""Of a line."""
SINGLE: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "linestyle": "none", "alpha": 0.7}
"""The circle of a single run, or of a single pair."""
EARLY = 0.25
"""The share of the tokens in which the loss falls so fast that a gap there would hide all later ones."""
APART = 1.01
"""Costs that differ by less are taken for one."""

Points = list[tuple[float, float]]
"""Cost and result of runs."""
Panels = dict[str, list[tuple[str, dict[str, Any], Any]]]
"""By title: label, style and values (Curves or Points) of what a panel shows."""


def draw_all(view: View, folder: Path) -> dict[str, Path | None]:
    """Draw every picture that the finished runs have figures for.

    Returns:
        Its file by the name of each picture; None for those that there are no figures for.

    Raises:
        UserError: a picture cannot be written.
    """
    value, loss = view.describe_measure(view.measure), view.describe_measure(view.loss)
    curves = {
        "gap_over_tokens": (_lines(view, lambda summary: _late_gap(view, summary)), "tokens", f"Δ {loss}"),
        "attention_distance": (_lines(view, _distances), "layer", "attention distance D (tokens)"),
        "attention_distance_gap": (_lines(view, distance_differences), "layer", "ΔD (tokens)"),
        "growing_heads": (_draw_growing(view), "training step", "heads of the layer"),
    }
    points = {
        "gap_by_scale": (_draw_by_scale(view), "parameters", f"Δ {value}"),
        "total_heads": (_draw_by_cost(view, total_heads), "total heads of all layers", value),
        "training_flops": (_draw_by_cost(view, training_flops), "training FLOPs", value),
        "parameters": (_draw_by_cost(view, parameters), "parameters at the end", value),
    }
    files = {name: folder / f"{name}.png" for name in ("results", "tuned", *curves, *points)}
    drawn = {
        "results": draw_results(view, files["results"]),
        "tuned": _draw_tuned(view, files["tuned"], value),
    }
    for draw, pictures in ((_draw_curves, curves), (_draw_points, points)):
        for name, (panels, x, y) in pictures.items():
            drawn[name] = _draw(files[name], panels, x, y, draw)
    for name in files:
        if not drawn[name]:
            files[name].unlink(missing_ok=True)  # of an earlier report
    return {name: file if drawn[name] else None for name, file in files.items()}


def select_listed(view: View) -> list[Summary]:
    """The variants that are compared one by one."""
    return [summary for summaries in view.listed.values() for summary in summaries]


def _style(view: View, summary: Summary) -> dict[str, Any]:
    """Of a variant, the same in all pictures."""
    names = list(dict.fromkeys(each.variant for each in select_listed(view)))
    return line_style(names.index(summary.variant), len(names))


def line_style(place: int, count: int) -> dict[str, Any]:
    """Colours whose lightness rises, and line styles and markers that differ between neighbours."""
    from matplotlib import colormaps

    return {
        "color": colormaps["plasma"](0.03 + 0.83 * place / max(1, count - 1)),
        "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def _lines(view: View, curves: Callable[[Summary], Curves]) -> Panels:
    return {
        name: [(each.label, _style(view, each), found) for each in summaries if (found := curves(each))]
        for name, summaries in view.listed.items()
    }


def _late_gap(view: View, summary: Summary) -> Curves:
    """Δ of the validation loss over tokens (arXiv 2606.27449, figure 3a)."""
    gaps = gap_over_tokens(view, summary)
    return {tokens: values for tokens, values in gaps.items() if tokens >= EARLY * max(gaps)}


def _distances(summary: Summary) -> Curves:
    """Attention distance by layer (arXiv 2606.27449, figure 4)."""
    return by_place([found for run in summary.finished if (found := distances(run))])


def _draw_growing(view: View) -> Panels:
    """Heads by layer over steps, at every step at which one of the runs shows heads."""
    panels: Panels = {}
    for summary in select_listed(view):
        histories = [head_history(run) for run in summary.finished if run.planned.grows and run.saved]
        steps = sorted({step for history in histories for step, _ in history})
        layers = len(histories[0][0][1]) if histories else 0
        title = ", ".join(filter(None, (summary.comparison.name, summary.label)))
        panels[title] = [
            (
                f"layer {layer}",
                line_style(layer, layers) | {"drawstyle": "steps-post"},
                {step: [_heads_at(history, step)[layer] for history in histories] for step in steps},
            )
            for layer in range(layers)
        ]
    return panels


def _heads_at(history: History, step: int) -> tuple[int, ...]:
    return next(heads for begin, heads in reversed(history) if begin <= step)


def _draw_by_scale(view: View) -> Panels:
    """Δ over the model's size, for several comparisons (arXiv 2606.27449, figure 3b)."""
    lines: list[tuple[str, dict[str, Any], Points]] = [
        (each.variant, _style(view, each), [(each.parameters[-1], gap) for gap in each.differences.values()])
        for each in view.compared
        if each.parameters
    ]
    return {"": lines if len(view.listed) > 1 and _differ(lines) else []}


def _draw_by_cost(view: View, cost: Callable[[RunResult], float | None]) -> Panels:
    """Results over what the runs have cost, for comparisons whose runs differ in it."""
    panels: Panels = {}
    for name, summaries in view.listed.items():
        lines = []
        for each in summaries:
            pairs = [(cost(each.runs[seed]), value) for seed, value in each.values.items()]
            if points := [(spent, value) for spent, value in pairs if spent is not None]:
                lines.append((each.label, _style(view, each), points))
        panels[name] = lines if _differ(lines) else []
    return panels


def _differ(lines: list[tuple[str, dict[str, Any], Points]]) -> bool:
    costs = [x for _, _, points in lines for x, _ in points]
    return bool(costs) and max(costs) > APART * min(costs)


def _draw(path: Path, panels: Panels, x: str, y: str, draw: Callable[..., None]) -> bool:
    """Draw the panels that have lines, if there are any."""
    shown = {title: lines for title, lines in panels.items() if lines}
    if not shown:
        return False
    with panel_axes(path, list(shown), min(4, math.ceil(math.sqrt(len(shown))))) as axes:
        for axis, lines in zip(axes, shown.values(), strict=True):
            for label, style, values in lines:
                if draw is _draw_curves:
                    style = style | {"spread": half_width if y.startswith("Δ") else sd_of}
                draw(axis, values, label=label, **style)
            axis.set(xlabel=x, ylabel=y)
            if x == "tokens":
                count_axis(axis.xaxis)
            elif x in ("layer", "training step", "total heads of all layers"):
                whole_numbers(axis.xaxis)
            if y.startswith("Δ"):
                axis.axhline(0, color="gray", linewidth=0.8)
    return True


def _draw_curves(axis: Any, curves: Curves, spread: Callable[[list[float]], float], **style: Any) -> None:
    """Mean over x, and around it the 95 % interval of differences, as in the tables, or the standard
    deviation."""
    means = [mean_of(values) for values in curves.values()]
    around = [spread(values) if len(values) > 1 else 0.0 for values in curves.values()]
    low, high = ([mean + sign * sd for mean, sd in zip(means, around, strict=True)] for sign in (-1, 1))
    # Dense markers hide the kind of line.
    axis.plot(list(curves), means, markevery=math.ceil(len(curves) / MOST_MARKERS), **style)
    axis.fill_between(list(curves), low, high, color=style["color"], alpha=0.13, linewidth=0)


def half_width(values: list[float]) -> float:
    """Of the 95 % interval of the mean, as the tables have it; NaN if a run diverged."""
    found = paired_interval(values, CONFIDENCE) if all(map(math.isfinite, values)) else None
    return found.high - found.mean if found else math.nan


def _draw_points(axis: Any, points: Points, **style: Any) -> None:
    """A circle for each run, and a large marker for their mean."""
    axis.plot(*zip(*points, strict=True), **SINGLE, color=style["color"])
    mean = [[mean_of(values)] for values in zip(*points, strict=True)]
    axis.plot(*mean, **style | {"linestyle": "none", "markersize": 9})


def draw_results(view: View, path: Path) -> bool:
    """Draw results and their mean, and beside them Δ with its 95 % interval, a row for each variant."""
    if not any(summary.values for summary in select_listed(view)):
        return False
    value, titles = view.describe_measure(view.measure), [name for name in view.listed for _ in range(2)]
    # Its unit is that of the study's measure.
    effect = view.study.file.effect if view.measure == view.study.file.measure else None
    height = 0.9 + 0.3 * max(map(len, view.listed.values()))
    with panel_axes(path, titles, columns=2, height=height) as axes:
        for summaries, values, gaps in zip(view.listed.values(), axes[::2], axes[1::2], strict=True):
            gaps.axvline(0, color="gray", linewidth=0.8)
            if effect:
                gaps.axvspan(
                    -effect, effect, color="gray", alpha=0.15, label=f"± {effect:g}, the effect sought"
                )
            for row, summary in enumerate(summaries):
                for axis, sample in ((values, summary.values), (gaps, summary.differences)):
                    axis.plot(list(sample.values()), [row] * len(sample), **SINGLE, color="black")
                behind = [
                    value
                    for seed, value in summary.values.items()
                    if summary.runs[seed].planned.name in view.behind
                ]
                if behind:
                    far = {"linestyle": "none", "color": "tab:red", "label": "fell behind"}
                    values.plot(behind, [row] * len(behind), "x", **far)
                if summary.values:
                    values.plot([summary.values.mean], [row], "|", color="tab:blue", markersize=15)
                if found := summary.differences.interval:
                    around = {"fmt": "s", "color": "tab:blue", "capsize": 3, "label": "mean, 95 % interval"}
                    gaps.errorbar([found.mean], [row], xerr=[found.high - found.mean], **around)
            for axis, labels in ((values, [each.label for each in summaries]), (gaps, [""] * len(summaries))):
                axis.set_yticks(range(len(summaries)), labels)
                axis.set_ylim(len(summaries) - 0.4, -0.6)
            values.set_xlabel(value)
            gaps.set_xlabel(f"Δ {value}; {view.better} is better")
    return True


def _draw_tuned(view: View, path: Path, value: str) -> bool:
    """Results of the pilots by the value that was tried, where values are numbers."""
    shown: dict[str, list[tuple[Summary, Tuned]]] = {}
    for name, summaries in view.listed.items():
        for summary in summaries:
            tuned = view.study.tuned.get(full_name((name, summary.variant)))
            if tuned and all(type(tried) in (int, float) for tried, _ in tuned.tried):
                shown.setdefault(name, []).append((summary, tuned))
    if not shown:
        return False
    with panel_axes(path, list(shown), columns=3, height=3.6, sharey=True) as axes:
        for axis, variants in zip(axes, shown.values(), strict=True):
            for summary, tuned in variants:
                style = _style(view, summary)
                points = [(tried, mean) for tried, mean in tuned.tried if mean is not None]
                axis.plot(*zip(*points, strict=True), label=summary.variant, **style)
                axis.axvline(tuned.value, color=style["color"], linestyle=":", linewidth=0.8)
            if all(tried > 0 for _, tuned in variants for tried, _ in tuned.tried):
                logarithmic_x(axis)
            axis.set(xlabel=" or ".join(dict.fromkeys(tuned.field for _, tuned in variants)), ylabel=value)
    return True


@contextmanager
def panel_axes(
    path: Path,
    titles: Sequence[str],
    columns: int,
    height: float = 3.1,
    width: float = 4.6,
    legend: bool = True,
    **subplots: Any,
) -> Iterator[list[Any]]:
    """Axes with these titles in rows of one length, and one legend below, each name once.

    Args:
        columns: at most so many.
        height: of a panel, in inches; *width*, too.
        subplots: further arguments of matplotlib's subplots.
    """
    rows = math.ceil(len(titles) / columns)
    columns = math.ceil(len(titles) / rows)
    size = (max(8.0, width * columns), 0.9 + height * rows)
    with save_figure(path, "out", rows, columns, size=size, dpi=110, squeeze=False, **subplots) as (
        figure,
        axes,
    ):
        for axis in axes.flat[len(titles) :]:
            axis.set_axis_off()
        for axis, title in zip(axes.flat, titles, strict=False):
            axis.set_title(title, fontsize="small")
        yield list(axes.flat[: len(titles)])
        if not legend:
            return
        entries: dict[str, Any] = {}
        for axis in axes.flat:
            entries |= {
                label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
        place = {"loc": "outside lower center", "ncols": int(size[0] / 2.3)}
        figure.legend(entries.values(), entries.keys(), fontsize="small", **place)
