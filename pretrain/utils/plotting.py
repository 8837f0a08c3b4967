"""Draws figures into files, without a display or global state."""

from __future__ import annotations

import importlib
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.utils.env_check import check_variables
from pretrain.utils.files import atomic_file


@contextmanager
def save_figure(
    path: Path,
    setting: str,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    dpi: int,
    notes: Sequence[str] = (),
    **subplots: Any,
) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure with its axes, written to *path* at the end of the block, unless an error occurred.

    Args:
        setting: the option that gave the path, the start of the message.
        size: width and height in inches.
        notes: what the reader must know, in red above the axes.
        subplots: passed on to ``Figure.subplots``; with ``squeeze=False`` the axes are always an array [rows,
            columns].

    Raises:
        UserError: the file cannot be written, or its ending is not a format that matplotlib knows.
    """
    check_variables("plots")
    figure = _figure_class()(figsize=size, layout="constrained")
    formats = sorted(figure.canvas.get_supported_filetypes().keys() - {"pgf"})  # which needs LaTeX
    # Not Path.is_dir, which raises an error for a name that is too long.
    if os.path.isdir(path) or path.suffix.lower().removeprefix(".") not in formats:  # noqa: PTH112
        raise UserError(
            f"{setting}: {str(path)!r} is not the name of a picture; give a file that ends with .png "
            f"(or {', '.join(formats)})"
        )
    if notes:
        lines = [line for note in notes for line in textwrap.wrap(note, int(14 * size[0]))]
        figure.suptitle("\n".join(lines), fontsize="x-small", color="tab:red")
    yield figure, figure.subplots(rows, columns, **subplots)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        form = path.suffix.lower().removeprefix(".")
        given = {"metadata": {"Date": None}} if form == "svg" else {}
        # Text stays text, and the same picture has the same bytes.
        fixed = {"svg.hashsalt": "pretrain", "svg.fonttype": "none"}
        with atomic_file(path) as partial, sys.modules["matplotlib"].rc_context(fixed):
            figure.savefig(partial, dpi=dpi, format=form, **given)
    except OSError as error:
        raise UserError(f"{setting}: cannot write {str(path)!r}: {error}".replace("\n", " ")) from error


def _figure_class() -> Any:
    """matplotlib's Figure, without pyplot: half the time, and no list of open figures.

    No back end is needed to write a picture into a file. If the environment names one that this machine
    lacks, importing pyplot would fail.
    """
    if "matplotlib" in sys.modules:
        return importlib.import_module("matplotlib.figure").Figure
    given = os.environ.pop("MPLBACKEND", None)
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    finally:
        if given is not None:
            os.environ["MPLBACKEND"] = given
    if given is not None:
        with suppress(ValueError):
            sys.modules["matplotlib"].rcParams["backend"] = given
    return figure


def count_axis(axis: Any) -> None:
    """Set the ticks of a matplotlib Axis (``axes.xaxis``) that counts tokens: 100k and 1.5B, not their
    zeros."""
    axis.set_major_formatter(lambda value, _: _short_count(value))


def _short_count(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def whole_numbers(axis: Any) -> None:
    """Set the ticks of a matplotlib Axis at whole numbers only: there is no layer 0.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def curve_colors(count: int) -> list[Any]:
    """A color for each of so many curves, no two the same: matplotlib's ten, or more from a color map."""
    from matplotlib import colormaps

    if count <= 10:
        return [f"C{index}" for index in range(count)]
    return [colormaps["turbo"](index / (count - 1)) for index in range(count)]


def logarithmic(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at its ticks, unless lines have no value above 0."""
    from matplotlib.ticker import LogFormatter

    lines = axes.get_lines()
    if lines and not any(0 < value < math.inf for line in lines for value in line.get_ydata()):
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))


def logarithmic_x(axes: Any) -> None:
    """Make the x axis logarithmic, with ticks at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
