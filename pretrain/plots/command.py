"""Curves of one run or several: ``python -m pretrain.plots runs/A [runs/B …] [--out curves.png]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError, run_command
from pretrain.config.command_line import CommandParser
from pretrain.metrics.file import FILE_NAME, read_metrics
from pretrain.run.differences import run_differences
from pretrain.utils.plotting import count_axis, logarithmic, saved_figure
from pretrain.utils.text import labelled, say


def draw_runs(folders: list[Path], out: Path) -> Path:
    """Draw loss (training faint, validation marked), learning rate and gradient norm over tokens, a colour a
    run.

    Differences between the runs that hinder a comparison are written above the curves. With different
    tokenizers only the validation's bits per byte are drawn, since nats per token do not compare. Classifiers
    have a panel with their accuracy.

    Raises:
        UserError: a folder without metrics, different tokenizers and no bits per byte, or *out* cannot be
            written.
    """
    rows_of_runs = [_rows(folder) for folder in folders]
    differences = run_differences(folders, [rows[-1]["step"] for rows in rows_of_runs])
    for line in differences.lines:
        say(f"warning: {line}", file=sys.stderr)
    loss = "val_bpb" if differences.tokenizers else "val_loss"
    run_without_loss = next(
        (f.name for f, rows in zip(folders, rows_of_runs, strict=True) if not _series(rows, loss)[0]), None
    )
    if differences.tokenizers and run_without_loss:
        raise UserError(
            f"runs: {differences.lines[0]}, and {run_without_loss} has no validation loss in bits per byte; "
            "draw the runs one by one"
        )
    classified = any(_series(rows, "val_accuracy")[0] for rows in rows_of_runs)
    ratios = (3, 1, 1, 1) if classified else (3, 1, 1)
    layout: dict[str, Any] = {"notes": differences.lines, "sharex": True, "height_ratios": ratios}
    with saved_figure(out, "out", len(ratios), size=(9, 9), dpi=120, **layout) as (_, axes):
        loss_axis, *accuracy_axes, rate_axis, norm_axis = axes
        for index, (folder, rows) in enumerate(zip(folders, rows_of_runs, strict=True)):
            color = f"C{index}"
            if not differences.tokenizers:
                loss_axis.plot(*_series(rows, "train_loss"), color=color, alpha=0.35, linewidth=1)
            loss_axis.plot(*_series(rows, loss), color=color, marker="o", markersize=4, label=folder.name)
            for axis in accuracy_axes:
                axis.plot(*_series(rows, "val_accuracy"), color=color, marker="o", markersize=4)
            for key in dict.fromkeys(key for row in rows for key in row if key.startswith("lr/")):
                rate_axis.plot(*_series(rows, key), color=color, linewidth=1)
            norm_axis.plot(*_series(rows, "grad_norm"), color=color, linewidth=1)
        label = f"loss (nats per {'example' if classified else 'token'})\nfaint: training, dots: validation"
        loss_axis.set_ylabel("validation loss (bits per byte)" if differences.tokenizers else label)
        for axis in accuracy_axes:
            axis.set(ylabel="accuracy", ylim=(0, 1.02))
        loss_axis.legend()
        rate_axis.set_ylabel("learning rate")
        norm_axis.set(ylabel="gradient norm", xlabel="tokens", xlim=(0, None))
        logarithmic(norm_axis)
        count_axis(norm_axis.xaxis)
    return out


def _rows(folder: Path) -> list[dict[str, Any]]:
    try:
        rows = read_metrics(folder)
    except OSError as error:
        raise UserError(f"run: {folder} has no {FILE_NAME} ({error.strerror}); give a run folder") from None
    if not rows:
        raise UserError(f"run: {folder / FILE_NAME} holds no rows yet")
    return rows


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Tokens and values of the rows that have *key*."""
    present = [row for row in rows if key in row and "tokens" in row]
    return [row["tokens"] for row in present], [row[key] for row in present]


def run_plots(arguments: list[str]) -> None:
    """Draw the curves of the runs on the command line.

    Raises:
        UserError: a folder without metrics.
    """
    parser = CommandParser(prog="python -m pretrain.plots", description="Draw the curves of runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--out", type=Path, help="PNG to write (default: plots/training.png of the first run)"
    )
    parsed = parser.parse_args(arguments)
    out = parsed.out or parsed.runs[0] / "plots" / "training.png"
    print(labelled("wrote", draw_runs(parsed.runs, out)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_plots, arguments)
