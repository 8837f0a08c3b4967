"""Figures that are drawn into files: no display, no state that outlives the picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError


@contextmanager
def saved_figure(
    path: Path,
    setting: str,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    dpi: int,
    **subplots: Any,
) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure with its axes, written to *path* at the end of the block; after an error nothing is.

    Args:
        setting: what the user gave the path with, the start of the message.
        size: width and height in inches.
        subplots: passed on to ``Figure.subplots``; with ``squeeze=False`` the axes are always an array [rows, columns].

    Raises:
        UserError: the file cannot be written, or its ending is no format that matplotlib knows.
    """
    from matplotlib.figure import Figure  # without pyplot: half the time, and no list of open figures

    figure = Figure(figsize=size, layout="constrained")
    yield figure, figure.subplots(rows, columns, **subplots)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Named, or matplotlib writes NAME.png beside a folder NAME.
        figure.savefig(path, dpi=dpi, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UserError(f"{setting}: cannot write {str(path)!r}: {error}".replace("\n", " ")) from error
