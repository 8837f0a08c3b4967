"""Draws the figures: curves over training, bars by layer, and differences with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from pretrain.diagnostics.comparison import (
    TITLES,
    Groups,
    at_the_end,
    bands,
    check_depth,
    difference,
    layer_values,
    over_training,
    upper_half,
)
from pretrain.diagnostics.measure import RunFigures
from pretrain.utils.plotting import logarithmic, saved_figure, whole_numbers

BESIDE = {1: 3, 2: 2, 3: 2}  # measures beside one another in curves.png, by the number of groups
LOGARITHMIC = ("attention_write", "ffn_write")  # the first layer writes many times what the embedding holds
LOSSES = {"val_loss": "validation loss (nats)", "val_bpb": "validation loss (bits per byte)"}
BY_GROUP = {
    "effective_lr": "effective learning rate\nlr · rms(u) of each group",
    "relative_update": "relative update\nlr · ‖u‖/‖W‖ of each group",
}
Differences = dict[str, dict[str, pd.DataFrame]]
"""By title of a panel and name of a group of runs: the bands of its differences to the baseline."""


def draw_all(
    groups: Groups, baseline: str, out: Path, notes: Sequence[str] = (), loss: str = "val_loss"
) -> list[Path]:
    """Draw every picture that the runs have figures for.

    Args:
        notes: what cannot be compared, written above each picture.
        loss: the validation loss to compare, ``val_bpb`` where the tokenizers differ.

    Returns:
        The files written: ``curves.png``, ``layers.png``, and with several groups ``difference.png`` and
        ``difference_training.png``.

    Raises:
        UserError: the folder cannot be written, or models of different depth are to be compared.
    """
    written = [draw_curves(groups, out / "curves.png", notes), draw_layers(groups, out / "layers.png", notes)]
    if len(groups) > 1:
        by_layer, training = layer_differences(groups, baseline), training_differences(groups, baseline, loss)
        path = out / "difference.png"
        written.append(draw_differences(by_layer, baseline, path, notes, _layer_axis, marker="o"))
        if training:
            path = out / "difference_training.png"
            written.append(draw_differences(training, baseline, path, notes, _step_axis))
    return written


def draw_curves(groups: Groups, path: Path, notes: Sequence[str] = ()) -> Path:
    """Draw measures over training: a panel per group of runs, a line per layer (dark: low, bright: high),
    seeds' mean.

    The last measures have a line for each optimizer group. Groups of runs are side by side, on one scale. A
    row has so many measures that the picture is not much longer than wide.
    """
    every_row = [row for runs in groups.values() for run in runs for row in run.rows]
    titles = {m: title for m, title in TITLES.items() if any(layer_values(row, m) for row in every_row)}
    titles |= BY_GROUP
    beside, count = BESIDE.get(len(groups), 1), len(groups)
    rows = math.ceil(len(titles) / beside)
    with _figure(path, rows, beside * count, 2.1, width=3.6, notes=notes) as (figure, axes):
        panels = axes.reshape(-1, count)  # a row of them for each measure
        for index, ((measure, title), row) in enumerate(zip(titles.items(), panels, strict=False)):
            for (name, runs), axis in zip(groups.items(), row, strict=True):
                _curves(axis, runs, measure)
                if measure in LOGARITHMIC or measure in BY_GROUP:
                    logarithmic(axis)
                if axis is row[0]:
                    axis.set_ylabel(title, fontsize="x-small")
                else:
                    axis.sharey(row[0])
                if index < beside:
                    axis.set_title(_group_title(name, runs), fontsize="small")
                _step_axis(axis)
        for axis in panels[len(titles) :].flat:
            axis.set_axis_off()
        _legend(figure, axes[0][0], ncols=6)
    return path


def _curves(axis: Any, runs: Sequence[RunFigures], measure: str) -> None:
    """A line for each layer, or for each optimizer group."""
    from matplotlib import colormaps

    if measure not in BY_GROUP:
        for layer in range(runs[0].num_layers):
            color = colormaps["viridis"](layer / max(1, runs[0].num_layers - 1))
            found = bands(over_training(runs, f"diagnostics/{measure}/layer_{layer}"))
            _line(axis, found, color=color, label=f"layer {layer}")
        return
    prefix = f"diagnostics/{measure}/"
    keys = dict.fromkeys(key for row in runs[0].rows for key in row if key.startswith(prefix))
    for index, key in enumerate(keys):
        _line(axis, bands(over_training(runs, key)), color=f"C{index}", label=key.removeprefix(prefix))
    if keys:
        axis.legend(fontsize="xx-small")


def draw_layers(groups: Groups, path: Path, notes: Sequence[str] = ()) -> Path:
    """Draw bars by layer at the last checkpoint, with the standard deviation over seeds; dots are single
    heads.

    Logarithmic axes have points in place of bars, since a bar has no zero to begin at.
    """
    found = {m: {name: bands(at_the_end(runs, m)) for name, runs in groups.items()} for m in TITLES}
    found = {m: by_group for m, by_group in found.items() if any(map(len, by_group.values()))}
    width = 0.8 / len(groups)
    with _panels(path, len(found), notes) as (figure, panels):
        for axis, (measure, by_group) in zip(panels, found.items(), strict=False):
            for index, (name, band) in enumerate(by_group.items()):
                places = band.index - 0.4 + (index + 0.5) * width
                style = {"yerr": band["sd"].fillna(0), "label": _group_title(name, groups[name])}
                if measure in LOGARITHMIC:
                    axis.errorbar(places, band["mean"], fmt="o", markersize=4, **style)
                else:
                    axis.bar(places, band["mean"], width, **style)
                heads = groups[name][0].last.get(f"diagnostics/{measure}/heads", [])
                for place, of_layer in zip(places, heads, strict=False):
                    axis.plot([place] * len(of_layer), of_layer, "k.", markersize=2, alpha=0.5)
            if measure in LOGARITHMIC:
                logarithmic(axis)
            axis.set_title(TITLES[measure], fontsize="small")
            _layer_axis(axis)
        explained = [("dots: single heads of the first seed", "k.")]
        if any(len(runs) > 1 for runs in groups.values()):
            explained.append(("lines: ± one standard deviation over the seeds", "k|"))
        _legend(figure, panels[0], ncols=2, explained=explained)
    return path


def layer_differences(groups: Groups, baseline: str) -> Differences:
    """group − baseline by layer at the last checkpoint, over pairs of seeds.

    For attention distance this is the figure of arXiv 2606.27449: ΔD_l of a schedule against the uniform one.

    Raises:
        UserError: models of another depth.
    """
    check_depth(groups, baseline)
    tables = {
        title: {name: at_the_end(runs, measure) for name, runs in groups.items()}
        for measure, title in TITLES.items()
    }
    return _differences(tables, baseline)


def training_differences(groups: Groups, baseline: str, loss: str = "val_loss") -> Differences:
    """group − baseline over training: the loss, and the measures averaged over the upper half of the layers.

    Empty when the metrics of the runs have no step in common.
    """
    tables = {LOSSES[loss]: {name: over_training(runs, loss) for name, runs in groups.items()}}
    for measure, title in TITLES.items():
        if measure != "feature_drift":  # of the lower half only
            by_group = {name: upper_half(runs, measure) for name, runs in groups.items()}
            tables[f"{title}, upper half"] = by_group
    return _differences(tables, baseline)


def _differences(tables: Differences, baseline: str) -> Differences:
    """Of tables by title and group: the bands of the differences to the baseline, where there are any."""
    found = {
        f"Δ {title}": {
            name: bands(difference(ours, by_group[baseline]))
            for name, ours in by_group.items()
            if name != baseline
        }
        for title, by_group in tables.items()
    }
    return {title: by_group for title, by_group in found.items() if any(map(len, by_group.values()))}


def draw_differences(
    found: Differences,
    baseline: str,
    path: Path,
    notes: Sequence[str],
    scale: Callable[[Any], None],
    **style: Any,
) -> Path:
    """Draw a panel for each title, in it a line for each group around zero: mean ± one standard deviation."""
    with _panels(path, len(found), notes) as (figure, panels):
        for axis, (title, by_group) in zip(panels, found.items(), strict=False):
            axis.axhline(0, color="gray", linewidth=0.8)
            for index, (name, band) in enumerate(by_group.items()):
                _line(axis, band, color=f"C{index}", label=f"{name} − {baseline}", **style)
            axis.set_title(title, fontsize="small")
            scale(axis)
        _legend(figure, panels[0], ncols=2)
    return path


def _group_title(name: str, runs: Sequence[RunFigures]) -> str:
    return f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name


def _line(axis: Any, band: pd.DataFrame, **style: Any) -> None:
    """Draw the mean as a line, one standard deviation around it as a band."""
    if band.empty:
        return
    marker = style.pop("marker", "." if len(band) < 30 else None)
    axis.plot(band.index, band["mean"], linewidth=1.2, marker=marker, markersize=4, **style)
    if band["sd"].notna().all():
        low, high = band["mean"] - band["sd"], band["mean"] + band["sd"]
        axis.fill_between(band.index, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _layer_axis(axis: Any) -> None:
    axis.set_xlabel("layer", fontsize="x-small")
    whole_numbers(axis.xaxis)


def _step_axis(axis: Any) -> None:
    axis.set_xlabel("step", fontsize="x-small")
    axis.set_xlim(left=0)
    whole_numbers(axis.xaxis)


def _legend(figure: Any, axis: Any, ncols: int, explained: Sequence[tuple[str, str]] = ()) -> None:
    """Explain the lines of *axis* and the band around them; *explained*: pairs of text and matplotlib
    style."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles, _ = axis.get_legend_handles_labels()
    if not handles:
        return
    if any(panel.collections for panel in figure.axes if not explained):
        band = "band: ± one standard deviation over the seeds"
        handles.append(Patch(color="gray", alpha=0.4, label=band))
    for text, style in explained:
        handles.append(Line2D([], [], color=style[0], marker=style[1], linestyle="none", label=text))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, fontsize="small")


@contextmanager
def _panels(path: Path, count: int, notes: Sequence[str]) -> Iterator[tuple[Any, list[Any]]]:
    """So many axes, three beside one another; what is left of the grid is blank."""
    with _figure(path, math.ceil(count / 3), 3, 2.6, notes=notes) as (figure, axes):
        yield figure, list(axes.flat)
        for axis in axes.flat[count:]:
            axis.set_axis_off()


def _figure(
    path: Path, rows: int, columns: int, height: float, width: float = 4.2, **options: Any
) -> AbstractContextManager[tuple[Any, Any]]:
    """A grid of axes of so many inches each, saved at the end of the block."""
    rows = max(1, rows)
    size = (width * columns, 0.6 + height * rows)
    return saved_figure(path, "out", rows, columns, size=size, dpi=110, squeeze=False, **options)
