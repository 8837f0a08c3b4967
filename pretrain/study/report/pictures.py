"""The pictures of a report. Lines also differ in style and marker."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from pretrain.study.statistics.paired import mean_of
from pretrain.study.summaries import Summary, View
from pretrain.utils.plotting import logarithmic_x, save_figure, whole_numbers

LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "d", ">")
SINGLE: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "linestyle": "none", "alpha": 0.7}
"""The circle of a single run, or of a single pair."""
AROUND: dict[str, Any] = {"fmt": "s", "color": "tab:blue", "capsize": 3, "label": "mean, 95 % interval"}


def line_style(place: int, count: int) -> dict[str, Any]:
    """Colours whose lightness rises, and line styles and markers that differ between neighbours."""
    from matplotlib import colormaps

    return {
        "color": colormaps["plasma"](0.03 + 0.83 * place / max(1, count - 1)),
        "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


@contextmanager
def panel_axes(
    path: Path,
    titles: Sequence[str],
    columns: int,
    height: float = 3.1,
    width: float = 4.6,
    heading: str = "",
    **subplots: Any,
) -> Iterator[list[Any]]:
    """Axes with these titles in rows of one length, and one legend below, each name once.

    Args:
        columns: at most so many.
        heading: what the picture shows, above it.
        height, width: of a panel, in inches.
        subplots: further arguments of matplotlib's subplots.
    """
    rows = math.ceil(len(titles) / columns)
    columns = math.ceil(len(titles) / rows)
    size = (max(8.0, width * columns), 0.9 + height * rows)
    with save_figure(path, "out", rows, columns, size=size, dpi=110, squeeze=False, **subplots) as (
        figure,
        axes,
    ):
        figure.suptitle(textwrap.fill(heading, int(11 * size[0])), x=0.01, ha="left")
        for axis in axes.flat[len(titles) :]:
            axis.set_axis_off()
        for axis, title in zip(axes.flat, titles, strict=False):
            axis.set_title(title, fontsize="small")
        yield list(axes.flat[: len(titles)])
        named = (dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True)) for axis in axes.flat)
        entries = {label: handle for of_axis in named for label, handle in of_axis.items()}
        place = {"loc": "outside lower center", "ncols": int(size[0] / 2.3)}
        figure.legend(entries.values(), entries.keys(), fontsize="small", **place)


def draw_all(view: View, folder: Path) -> dict[str, Path]:
    """Draw every picture that the finished runs have values for; returns its file by name.

    Raises:
        UserError: a picture cannot be written.
    """
    files = {name: folder / f"{name}.svg" for name in DRAWN}
    drawn = {name: file for name, file in files.items() if DRAWN[name](view, file, "")}
    for name in files.keys() - drawn.keys():
        files[name].unlink(missing_ok=True)  # of an earlier report
    return drawn


def factor_name(factor: str) -> str:
    """A factor for readers: "heads of layer 1" for heads[0], "learning rate" for optimizer.learning_rate."""
    if layers := re.fullmatch(r"(.+)\[(\d+)(?::(\d+))?\]", factor):
        first, last = int(layers[2]) + 1, int(layers[3] or int(layers[2]) + 1)
        where = f"layer {first}" if first == last else f"layers {first} to {last}"
        return f"{factor_name(layers[1])} of {where}"
    return factor.rpartition(".")[2].replace("_", " ")


def _style(view: View, summary: Summary) -> dict[str, Any]:
    """Of a variant, the same in all pictures."""
    names = [each.variant for each in view.listed]
    return line_style(names.index(summary.variant), len(names))


def _draw_effects(view: View, path: Path, heading: str) -> bool:
    """Draw a panel for each factor: the effect of each level; all on one scale."""
    effects, value = view.analysis, view.value
    if effects is None:
        return False
    factors = effects.design.levels
    titles = list(map(factor_name, factors))
    with panel_axes(path, titles, columns=4, width=2.8, heading=heading, sharey=True) as axes:
        for axis, (factor, labels) in zip(axes, factors.items(), strict=True):
            estimates = [each.least_squares for each in effects.levels if each.factor == factor]
            axis.axhline(0, color="gray", linewidth=0.8)
            values = [each.value for each in estimates]
            halves = [(each.high - each.low) / 2 for each in estimates]
            style = {"fmt": "o-", "capsize": 3, "label": "least squares, 95 % interval"}
            axis.errorbar(range(len(labels)), values, yerr=halves, **style)
            axis.set_xticks(range(len(labels)), labels)
            axis.set_xlim(-0.5, len(labels) - 0.5)
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(f"effect on {value}\n{view.better} is better")
    return True


def _draw_forest(view: View, path: Path, heading: str) -> bool:
    """Draw results and their mean, and next to them Δ with its 95 % interval, a row for each variant."""
    shown = [summary for summary in view.listed if summary.values]
    if not shown:
        return False
    # Its unit is that of the study's measure.
    effect = view.study.file.effect if view.measure == view.study.file.measure else None
    height = 0.9 + 0.3 * len(shown)
    with panel_axes(path, ["", ""], columns=2, height=height, heading=heading) as (values, gaps):
        gaps.axvline(0, color="gray", linewidth=0.8)
        if effect:
            gaps.axvspan(-effect, effect, color="gray", alpha=0.15, label=f"± {effect:g}, the effect sought")
        for row, summary in enumerate(shown):
            for axis, sample in ((values, summary.values), (gaps, summary.differences)):
                axis.plot(list(sample.values()), [row] * len(sample), **SINGLE, color="black")
                if found := sample.interval:
                    axis.errorbar([found.value], [row], xerr=[found.high - found.value], **AROUND)
            runs = summary.runs
            far = [each for seed, each in summary.values.items() if runs[seed].planned.name in view.outliers]
            if far:
                values.plot(far, [row] * len(far), "x", linestyle="none", color="tab:red", label="outlier")
        for axis, labels in ((values, [each.label for each in shown]), (gaps, [""] * len(shown))):
            axis.set_yticks(range(len(shown)), labels)
            axis.set_ylim(len(shown) - 0.4, -0.6)
            axis.locator_params(axis="x", nbins=5)
        values.set_xlabel(view.axis)
        gaps.set_xlabel(f"Δ {view.axis}")
    return True


def _draw_tuned(view: View, path: Path, heading: str) -> bool:
    """Results of the pilots by the value that was tried, where values are numbers."""
    known = view.study.tuned
    shown = [(each, known[each.variant]) for each in view.listed if each.variant in known]
    shown = [each for each in shown if all(type(tried) in (int, float) for tried, _ in each[1].tried)]
    if not shown:
        return False
    with panel_axes(path, [""], columns=1, height=3.6, heading=heading) as (axis,):
        for summary, tuned in shown:
            style = _style(view, summary)
            points = [(tried, mean) for tried, mean in tuned.tried if mean is not None]
            axis.plot(*zip(*points, strict=True), label=summary.variant, **style)
            axis.axvline(tuned.value, color=style["color"], linestyle=":", linewidth=0.8)
        if all(tried > 0 for _, tuned in shown for tried, _ in tuned.tried):
            logarithmic_x(axis)
        settings = " or ".join(dict.fromkeys(factor_name(tuned.field) for _, tuned in shown))
        axis.set(xlabel=settings, ylabel=view.axis)
    return True


def _draw_growing(view: View, path: Path, heading: str) -> bool:
    """Heads by layer over steps: the median of the runs, of an even number the upper one."""
    panels: dict[str, list[pd.DataFrame]] = {}
    for summary in view.listed:
        growing = [run for run in summary.finished if run.planned.run.growth.active and run.saved]
        if growing:
            panels[summary.label] = [pd.DataFrame(run.head_history) for run in growing]
    if not panels:
        return False
    with panel_axes(path, list(panels), columns=3, heading=heading, sharey=True) as axes:
        for axis, histories in zip(axes, panels.values(), strict=True):
            steps = sorted({step for history in histories for step in history.columns})
            known = [history.reindex(columns=steps).ffill(axis=1) for history in histories]
            heads = pd.concat(known).groupby(level=0).quantile(interpolation="higher")
            for layer, counts in heads.iterrows():
                style = line_style(layer, len(heads)) | {"marker": "", "drawstyle": "steps-post"}
                axis.plot(steps, counts, label=f"layer {layer + 1}", **style)
            axis.set(xlabel="training step", ylabel="heads of the layer")
            whole_numbers(axis.yaxis)
            whole_numbers(axis.xaxis)
    return True


def _draw_flops(view: View, path: Path, heading: str) -> bool:
    """Results against training FLOPs, where runs differ in them: a circle for each run, and a large marker
    for the mean of a variant, with its 95 % interval."""
    lines = []
    for each in view.listed:
        if points := [(x, y) for seed, y in each.values.items() if (x := each.runs[seed].training_flops)]:
            lines.append((each, points))
    costs = [x for _, points in lines for x, _ in points]
    if not costs or max(costs) <= 1.01 * min(costs):  # as good as one
        return False
    with panel_axes(path, [""], columns=1, height=4.0, heading=heading) as (axis,):
        for summary, points in lines:
            style = _style(view, summary)
            axis.plot(*zip(*points, strict=True), **SINGLE, color=style["color"])
            mean = [[mean_of(values)] for values in zip(*points, strict=True)]
            large = {"linestyle": "none", "markersize": 9, "capsize": 3, "label": summary.label}
            found = summary.values.interval
            axis.errorbar(*mean, yerr=found and [found.high - found.value], **style | large)
        axis.set(xlabel="training FLOPs", ylabel=view.axis)
    return True


DRAWN: dict[str, Callable[[View, Path, str], bool]] = {
    "effects": _draw_effects,
    "results": _draw_forest,
    "tuned": _draw_tuned,
    "growing_heads": _draw_growing,
    "training_flops": _draw_flops,
}
"""In the page's order; each takes a heading, and returns whether there was something to draw."""
