"""What the pictures of a report share: panels, and styles of lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.utils.plotting import save_figure

LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "d", ">")
SINGLE: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "linestyle": "none", "alpha": 0.7}
"""The circle of a single run, or of a single pair."""


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
