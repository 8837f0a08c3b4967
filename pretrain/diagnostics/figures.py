"""Draws the figures: lines over training or over layers, with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pretrain.diagnostics.comparison import (
    TITLES,
    Groups,
    bands,
    collect_over_steps,
    describe_depths,
    difference,
    take_last,
    upper_half,
)
from pretrain.utils.plotting import logarithmic, save_figure, whole_numbers

BY_GROUP = {
    "effective_lr": "effective learning rate lr · rms(u)",
    "relative_update": "relative update lr · ‖u‖/‖W‖",
}
"""Measures of optimizer groups."""
LOGARITHMIC = {TITLES["attention_write"], TITLES["ffn_write"], *BY_GROUP.values()}
"""The first layer writes many times what the embedding holds."""
LOSSES = {"val_loss": "validation loss (nats)", "val_bpb": "validation loss (bits per byte)"}
BESIDE = {1: 3, 2: 2, 3: 2}
"""Panels side by side in curves.png, by the number of groups of runs."""
Tables = dict[str, dict[str, pd.DataFrame]]
"""By title of a panel and label of a line: a row for each seed, a column for each layer or step."""


def draw_all(
    groups: Groups, baselines: Mapping[str, str], out: Path, notes: Sequence[str] = (), loss: str = "val_loss"
) -> list[Path]:
    """Draw every picture for which the runs have values.

    Args:
        baselines: by group, the one that differences are taken from.
        notes: what cannot be compared, written above each picture.
        loss: the validation loss to compare, ``val_bpb`` where the tokenizers differ.

    Returns:
        The files written: ``curves.png``, ``layers.png``, and with several groups ``difference.png`` (of
        models of one depth; for attention distance as in arXiv 2606.27449: ΔD_l of a schedule against the
        uniform one) and ``difference_training.png`` (the measures averaged over the upper half of the
        layers).

    Raises:
        UserError: the folder cannot be written.
    """
    ends, upper = (
        {
            title: {name: take(runs, measure) for name, runs in groups.items()}
            for measure, title in TITLES.items()
        }
        for take in (take_last, upper_half)
    )
    pictures = {"curves": (curves(groups), "step"), "layers": (ends, "layer")}
    if len(groups) > 1:
        training = {LOSSES[loss]: {name: collect_over_steps(runs, loss) for name, runs in groups.items()}}
        training |= {f"{title}, upper half": tables for title, tables in upper.items()}
        if not describe_depths(groups):
            pictures["difference"] = differences(ends, baselines), "layer"
        pictures["difference_training"] = differences(training, baselines), "step"
    written = []
    for name, (tables, along) in pictures.items():
        shown = {
            title: lines for title, lines in tables.items() if any(len(bands(t)) for t in lines.values())
        }
        columns = len(groups) * BESIDE.get(len(groups), 1) if name == "curves" else 3
        if shown:
            written.append(draw(shown, along, out / f"{name}.png", columns, notes))
    return written


def curves(groups: Groups) -> Tables:
    """Measures over training: a panel for each measure and group of runs, in it a line for each layer or
    optimizer group."""
    found: Tables = {}
    for measure, title in (TITLES | BY_GROUP).items():
        prefix = f"diagnostics/{measure}/"
        for name, runs in groups.items():
            keys = dict.fromkeys(key for row in runs[0].rows for key in row if key.startswith(prefix))
            keys.pop(f"{prefix}heads", None)
            lines = {key.removeprefix(prefix): collect_over_steps(runs, key) for key in keys}
            found[f"{title}\n{name}"] = lines
    return found


def differences(tables: Tables, baselines: Mapping[str, str]) -> Tables:
    """Of tables by title and group: the differences of each group to its baseline, over pairs of seeds."""
    return {
        f"Δ {title}": {
            f"{name} − {baselines[name]}": difference(ours, lines[baselines[name]])
            for name, ours in lines.items()
            if baselines.get(name, name) != name
        }
        for title, lines in tables.items()
    }


def draw(tables: Tables, along: str, path: Path, columns: int, notes: Sequence[str] = ()) -> Path:
    """Draw a panel for each title: lines of means over seeds in bands of one standard deviation.

    Panels of the same measure, the first line of their titles, have the same scale. Colours go from dark to
    bright.

    Args:
        along: what the x axis counts.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import colormaps

    labels = dict.fromkeys(label for lines in tables.values() for label in lines)
    colors = {
        label: colormaps["viridis"](0.9 * i / max(1, len(labels) - 1)) for i, label in enumerate(labels)
    }
    rows = math.ceil(len(tables) / columns)
    size = (4.0 * columns, 0.6 + 2.4 * rows)
    scales: dict[str, Any] = {}
    legend: dict[str, Any] = {}
    grid = save_figure(path, "out", rows, columns, size=size, dpi=110, notes=notes, squeeze=False)
    with grid as (figure, axes):
        for axis in axes.flat[len(tables) :]:
            axis.set_axis_off()
        for axis, (title, lines) in zip(axes.flat, tables.items(), strict=False):
            measure = title.split("\n")[0]
            if measure in scales:
                axis.sharey(scales[measure])
            scales[measure] = axis
            for label, table in lines.items():
                band, color = bands(table), colors[label]
                mean, deviation = band["mean"], band["sd"]
                [legend[label]] = axis.plot(band.index, mean, ".-", color=color, label=label, linewidth=1.2)
                axis.fill_between(band.index, mean - deviation, mean + deviation, color=color, alpha=0.2)
            if measure in LOGARITHMIC:
                logarithmic(axis)
            if measure.startswith("Δ"):
                axis.axhline(0, color="gray", linewidth=0.8)
            axis.set_title(title, fontsize="small")
            axis.set_xlabel(along, fontsize="x-small")
            whole_numbers(axis.xaxis)
        explained = "lines: means over the seeds; bands: ± one standard deviation"
        place = {"loc": "outside lower center", "ncols": 6, "fontsize": "small"}
        figure.legend(handles=list(legend.values()), title=explained, **place)
    return path
