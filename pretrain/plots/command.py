"""Curves of one run or several: ``head-schedules plot runs/A [runs/B …] [--out curves.png]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.config.command_line import CommandParser
from pretrain.metrics.file import FILE_NAME, Columns
from pretrain.runtime.command import run_command
from pretrain.utils.format import log_line, name_folders, print_lines
from pretrain.utils.plotting import count_axis, curve_colors, logarithmic, save_figure

MOST_POINTS = 4000
"""Points of a curve that a picture can show: several for each column of its pixels."""
SMOOTHED = 0.02
"""Share of a run's steps that a point of its smoothed training loss is the mean of."""


def draw_runs(folders: list[Path], out: Path) -> Path:
    """Draw loss (training faint and smoothed, validation marked), learning rate and gradient norm over
    tokens, a colour a run.

    Differences between the runs that hinder a comparison are written above the curves. With different
    tokenizers only the validation's bits per byte are drawn, since nats per token do not compare. Classifiers
    have a panel with their accuracy.

    Raises:
        UserError: a folder without metrics, different tokenizers and no bits per byte, or *out* cannot be
            written.
    """
    runs = [_columns(folder) for folder in folders]
    if len(runs) > 1:
        from pretrain.plots.differences import run_differences  # imports torch

        differences = run_differences(folders, [int(run["step"][0][-1]) for run in runs])
        notes, tokenizers = differences.lines, differences.tokenizers
    else:
        notes, tokenizers = [], False
    for line in notes:
        print_lines(f"warning: {line}", file=sys.stderr)
    loss = "val_bpb" if tokenizers else "val_loss"
    names = name_folders(folders)
    without_loss = next((name for name, run in zip(names, runs, strict=True) if not run.names(loss)), None)
    if tokenizers and without_loss:
        raise UserError(
            f"runs: {notes[0]}, and {without_loss} has no validation loss in bits per byte; draw the runs "
            "one by one"
        )
    classified = any(run.names("val_accuracy") for run in runs)
    ratios = (3, 1, 1, 1) if classified else (3, 1, 1)
    layout: dict[str, Any] = {"notes": notes, "sharex": True, "height_ratios": ratios}
    with save_figure(out, "out", len(ratios), size=(9, 9), dpi=120, **layout) as (_, axes):
        loss_axis, *accuracy_axes, rate_axis, norm_axis = axes
        for color, name_of_run, run in zip(curve_colors(len(runs)), names, runs, strict=True):
            if not tokenizers:
                curve = run.over_tokens("train_loss")
                loss_axis.plot(*_thin(*curve), color=color, alpha=0.25, linewidth=1)
                loss_axis.plot(*_thin(*smooth(*curve)), color=color, linewidth=1.2)
            loss_axis.plot(
                *_curve(run, loss), color=color, marker="o", markersize=4, linestyle="--", label=name_of_run
            )
            for axis in accuracy_axes:
                axis.plot(*_curve(run, "val_accuracy"), color=color, marker="o", markersize=4)
            for name in run.names("lr/"):
                rate_axis.plot(*_curve(run, name), color=color, linewidth=1)
            norm_axis.plot(*_curve(run, "grad_norm"), color=color, linewidth=1)
        label = f"loss (nats per {'example' if classified else 'token'})"
        label += "\nline: training, smoothed; dots: validation"
        loss_axis.set_ylabel("validation loss (bits per byte)" if tokenizers else label)
        for axis in accuracy_axes:
            axis.set(ylabel="accuracy", ylim=(0, 1.02))
        loss_axis.legend()
        loss_axis.set_title(names[0] if len(runs) == 1 else "")
        rate_axis.set_ylabel("learning rate")
        norm_axis.set(ylabel="gradient norm", xlabel="tokens", xlim=(0, None))
        logarithmic(norm_axis)
        count_axis(norm_axis.xaxis)
    return out


def _columns(folder: Path) -> Columns:
    columns = Columns(folder)
    if not columns.names():
        raise UserError(f"run: {folder / FILE_NAME} is missing or holds no rows yet; give a run folder")
    return columns


def _curve(run: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    return _thin(*run.over_tokens(name))


def smooth(tokens: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve's means over SMOOTHED of its rows, each at their mean number of tokens; values that are not
    finite are left out."""
    width = max(1, round(SMOOTHED * len(values)))
    finite = np.isfinite(values)

    def sums(numbers: np.ndarray) -> np.ndarray:
        """Over every *width* neighbours."""
        total = np.concatenate([[0.0], np.cumsum(numbers, dtype=np.float64)])
        return total[width:] - total[:-width]

    counts = sums(finite)
    with np.errstate(invalid="ignore"):
        return sums(tokens) / width, sums(np.where(finite, values, 0)) / counts


def _thin(tokens: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values; of more than a picture can show, the lowest and the highest of each stretch."""
    if len(values) <= MOST_POINTS:
        return tokens, values
    stretches = np.array_split(np.arange(len(values)), MOST_POINTS // 2)
    low, high = (np.where(np.isnan(values), end, values) for end in (np.inf, -np.inf))
    extremes = [(part[low[part].argmin()], part[high[part].argmax()]) for part in stretches]
    drawn = np.unique([0, *np.ravel(extremes), len(values) - 1])
    return tokens[drawn], values[drawn]


def run_plots(arguments: list[str]) -> None:
    """Draw the curves of the runs on the command line.

    Raises:
        UserError: a folder without metrics.
    """
    parser = CommandParser(prog="head-schedules plot", description="Draw the curves of runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--out",
        type=Path,
        help="PNG to write (default: plots/training.png of the run, of several plots/comparison.png of the "
        "first)",
    )
    parsed = parser.parse_args(arguments)
    name = "training.png" if len(parsed.runs) == 1 else "comparison.png"
    out = parsed.out or parsed.runs[0] / "plots" / name
    print(log_line("wrote", draw_runs(parsed.runs, out)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_plots, arguments)
