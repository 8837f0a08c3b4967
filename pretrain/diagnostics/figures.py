"""Draws the figures: curves over training, bars by layer, and differences with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.diagnostics.comparison import (
    BY_LAYER,
    TITLES,
    Band,
    difference_over_training,
    differences,
    layer_bands,
    over_training,
)
from pretrain.diagnostics.measure import RunFigures
from pretrain.utils.plotting import logarithmic, saved_figure, whole_numbers

Groups = dict[str, list[RunFigures]]
BESIDE = {1: 3, 2: 2, 3: 2}  # measures beside one another in curves.png, by the number of groups
LOGARITHMIC = ("attention_write", "ffn_write")  # the first layer writes many times what the embedding holds
LOSSES = {"val_loss": "validation loss (nats)", "val_bpb": "validation loss (bits per byte)"}
BY_GROUP = {
    "effective_lr": "effective learning rate\nlr · rms(u) of each group",
    "relative_update": "relative update\nlr · ‖u‖/‖W‖ of each group",
}


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
    others = [name for name in groups if name != baseline]
    if others:
        written.append(draw_difference(groups, baseline, out / "difference.png", notes))
        path = out / "difference_training.png"
        training = draw_difference_over_training(groups, baseline, path, notes, loss)
        written += [training] if training else []
    return written


def draw_curves(groups: Groups, path: Path, notes: Sequence[str] = ()) -> Path:
    """Draw measures over training: a panel per group of runs, a line per layer (dark: low, bright: high),
    seeds' mean.

    The last measures have a line for each optimizer group. Groups of runs are side by side, on one scale. A
    row has so many measures that the picture is not much longer than wide.
    """
    from matplotlib import colormaps

    measures = [
        m for m in BY_LAYER if any(_has_measure(run.rows, m) for runs in groups.values() for run in runs)
    ]
    all_measures = [*measures, *BY_GROUP]
    measures_per_row = BESIDE.get(len(groups), 1)
    rows = math.ceil(len(all_measures) / measures_per_row)
    with _figure(path, rows, measures_per_row * len(groups), 2.1, width=3.6, notes=notes) as (figure, axes):
        for axis in axes.flat:
            axis.set_axis_off()
        for index, measure in enumerate(all_measures):
            row, block = divmod(index, measures_per_row)
            first = axes[row][block * len(groups)]
            for column, (name, runs) in enumerate(groups.items(), start=block * len(groups)):
                axis = axes[row][column]
                axis.set_axis_on()
                if measure in BY_GROUP:
                    _curves_by_group(axis, runs, measure)
                else:
                    for layer in range(runs[0].num_layers):
                        bands = over_training(runs, f"diagnostics/{measure}/layer_{layer}")
                        color = colormaps["viridis"](layer / max(1, runs[0].num_layers - 1))
                        _line(axis, bands, color=color, label=f"layer {layer}")
                if measure in LOGARITHMIC or measure in BY_GROUP:
                    logarithmic(axis)
                if axis is first:
                    axis.set_ylabel((TITLES | BY_GROUP)[measure], fontsize="x-small")
                else:
                    axis.sharey(first)
                if row == 0:
                    axis.set_title(_group_title(name, runs), fontsize="small")
                _step_axis(axis)
        _legend(figure, axes[0][0], ncols=6)
    return path


def _curves_by_group(axis: Any, runs: Sequence[RunFigures], measure: str) -> None:
    prefix = f"diagnostics/{measure}/"
    keys = dict.fromkeys(key for line in runs[0].rows for key in line if key.startswith(prefix))
    for index, key in enumerate(keys):
        _line(axis, over_training(runs, key), color=f"C{index}", label=key.removeprefix(prefix))
    if keys:
        axis.legend(fontsize="xx-small")


def draw_layers(groups: Groups, path: Path, notes: Sequence[str] = ()) -> Path:
    """Draw bars by layer at the last checkpoint, with the standard deviation over seeds; dots are single
    heads.

    Logarithmic axes have points in place of bars, since a bar has no zero to begin at.
    """
    measures = [
        m for m in BY_LAYER if any(layer_bands([r.last for r in runs], m) for runs in groups.values())
    ]
    width = 0.8 / len(groups)
    with _panels(path, len(measures), notes) as (figure, panels):
        for axis, measure in zip(panels, measures, strict=False):
            for index, (name, runs) in enumerate(groups.items()):
                bands = layer_bands([run.last for run in runs], measure)
                places = [layer - 0.4 + (index + 0.5) * width for layer in bands]
                errors = [0 if math.isnan(band.sd) else band.sd for band in bands.values()]
                means = [band.mean for band in bands.values()]
                if measure in LOGARITHMIC:
                    style = {"fmt": "o", "markersize": 4, "label": _group_title(name, runs)}
                    axis.errorbar(places, means, errors, **style)
                else:
                    axis.bar(places, means, width, yerr=errors, label=_group_title(name, runs))
                heads = runs[0].last.get(f"diagnostics/{measure}/heads")
                for place, layer in zip(places, bands, strict=True):
                    if heads:
                        axis.plot([place] * len(heads[layer]), heads[layer], "k.", markersize=2, alpha=0.5)
            if measure in LOGARITHMIC:
                logarithmic(axis)
            axis.set_title(TITLES[measure], fontsize="small")
            _layer_axis(axis)
        explained = [("dots: single heads of the first seed", "k.")]
        if any(len(runs) > 1 for runs in groups.values()):
            explained.append(("lines: ± one standard deviation over the seeds", "k|"))
        _legend(figure, panels[0], ncols=2, explained=explained)
    return path


def draw_difference(groups: Groups, baseline: str, path: Path, notes: Sequence[str] = ()) -> Path:
    """Draw group − baseline by layer at the last checkpoint, over pairs of seeds: mean ± one standard
    deviation.

    For attention distance this is the figure of arXiv 2606.27449: ΔD_l of a schedule against the uniform one.
    """
    found: dict[str, dict[str, dict[int, Band]]] = {
        "Δ " + TITLES[measure]: {
            name: differences(runs, groups[baseline], measure)
            for name, runs in groups.items()
            if name != baseline
        }
        for measure in BY_LAYER
    }
    _draw_differences(found, baseline, path, notes, _layer_axis, marker="o")
    return path


def draw_difference_over_training(
    groups: Groups, baseline: str, path: Path, notes: Sequence[str] = (), loss: str = "val_loss"
) -> Path | None:
    """Draw group − baseline over training: losses, and the measures averaged over the upper half of the
    layers.

    Returns None when the metrics of the runs have no step in common.
    """
    titles = {loss: LOSSES[loss]}
    titles |= {f"upper/{m}": TITLES[m] + ", upper half" for m in BY_LAYER if m != "feature_drift"}
    upper = {name: [_with_upper_half(run) for run in runs] for name, runs in groups.items()}
    before = upper.pop(baseline)
    found = {
        "Δ " + title: {name: difference_over_training(runs, before, key) for name, runs in upper.items()}
        for key, title in titles.items()
    }
    if not any(
        any(bands.values()) for bands in found.values()
    ):  # nothing was measured while the runs trained
        return None
    _draw_differences(found, baseline, path, notes, _step_axis)
    return path


def _draw_differences(
    found: dict[str, dict[str, dict[int, Band]]],
    baseline: str,
    path: Path,
    notes: Sequence[str],
    scale: Callable[[Any], None],
    **style: Any,
) -> None:
    """Draw a panel for each title that has bands, in it a line for each group, around zero."""
    drawn = {title: by_group for title, by_group in found.items() if any(by_group.values())}
    with _panels(path, len(drawn), notes) as (figure, panels):
        for axis, (title, by_group) in zip(panels, drawn.items(), strict=False):
            axis.axhline(0, color="gray", linewidth=0.8)
            for index, (name, bands) in enumerate(by_group.items()):
                _line(axis, bands, color=f"C{index}", label=f"{name} − {baseline}", **style)
            axis.set_title(title, fontsize="small")
            scale(axis)
        _legend(figure, panels[0], ncols=2)


def _with_upper_half(run: RunFigures) -> RunFigures:
    """The run with ``upper/MEASURE``, the mean over the layers l with 2 l >= L, in every row that has the
    measure."""
    upper = [layer for layer in range(run.num_layers) if 2 * layer >= run.num_layers]
    rows = []
    for row in run.rows:
        more = {}
        for measure in BY_LAYER:
            values = [row.get(f"diagnostics/{measure}/layer_{layer}") for layer in upper]
            if all(value is not None for value in values):
                more[f"upper/{measure}"] = sum(v for v in values if v is not None) / len(values)
        rows.append({**row, **more})
    return replace(run, rows=rows)


def _has_measure(rows: Sequence[dict[str, Any]], measure: str) -> bool:
    return any(key.startswith(f"diagnostics/{measure}/layer_") for row in rows for key in row)


def _group_title(name: str, runs: Sequence[RunFigures]) -> str:
    return f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name


def _line(axis: Any, bands: dict[int, Band], **style: Any) -> None:
    """Draw the mean as a line, one standard deviation around it as a band."""
    if not bands:
        return
    places, means = list(bands), [band.mean for band in bands.values()]
    marker = style.pop("marker", "." if len(places) < 30 else None)
    axis.plot(places, means, linewidth=1.2, marker=marker, markersize=4, **style)
    if not any(math.isnan(band.sd) for band in bands.values()):
        low = [band.mean - band.sd for band in bands.values()]
        high = [band.mean + band.sd for band in bands.values()]
        axis.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)


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

    handles, labels = axis.get_legend_handles_labels()
    if not handles:
        return
    if any(panel.collections for panel in figure.axes if not explained):
        handles.append(Patch(color="gray", alpha=0.4))
        labels.append("band: ± one standard deviation over the seeds")
    for text, style in explained:
        handles.append(Line2D([], [], color=style[0], marker=style[1], linestyle="none"))
        labels.append(text)
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize="small")


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
