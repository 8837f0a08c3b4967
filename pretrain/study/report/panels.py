"""What the pictures of a report share: a grid of panels, line styles, bands, titles and the legend below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.study.statistics import mean_of, sd_of
from pretrain.study.summaries import Summary, View
from pretrain.utils.plotting import saved_figure, whole_numbers

DPI = 110
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "d", ">")
MOST_MARKERS = 12
"""Of a line."""
MOST_BANDS = 3
"""With more lines in a panel their bands would hide one another."""
INCHES_PER_LETTER = 0.075
EARLY = 0.25
"""The share of the tokens in which the loss falls so fast that a gap there would hide all later ones."""
WIDTHS: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.4}
SINGLE: dict[str, Any] = WIDTHS | {
    "color": "black",
    "marker": "o",
    "markerfacecolor": "none",
    "markeredgewidth": 0.8,
    "linestyle": "none",
    "alpha": 0.7,
}
"""The circle of a single run, or of a single pair."""


def line_styles(view: View) -> dict[str, dict[str, Any]]:
    """A style for each variant's name, the same in all pictures: baselines black, others in colours.

    Of two variants that follow one another one is dark and one bright.
    """
    baselines = list(dict.fromkeys(comparison.baseline for comparison in view.study.comparisons))
    others = list(dict.fromkeys(s.variant for s in view.every if s.variant not in baselines))
    styles = {name: line_style(place, 1) | {"color": "black"} for place, name in enumerate(baselines)}
    for index, name in enumerate(others):
        place = index // 2 + (index % 2) * ((len(others) + 1) // 2)
        color = line_style(place, len(others))["color"]
        styles[name] = line_style(len(baselines) + index, len(others)) | {"color": color}
    return styles


def line_style(place: int, count: int) -> dict[str, Any]:
    """Colours whose lightness rises, and line styles and markers that differ between neighbours."""
    from matplotlib import colormaps

    return {
        "color": colormaps["plasma"](0.03 + 0.83 * place / max(1, count - 1)),
        "linestyle": LINE_STYLES[place % len(LINE_STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
        **WIDTHS,
    }


def move(artists: Sequence[Any], place: int, lines: int, right: float = 0.0, up: float = 0.0) -> None:
    """Move what was drawn for line *place* of several by so many points a line, so that none hides another.

    The limits of the axes are those of the data.
    """
    from matplotlib.transforms import ScaledTranslation

    middle = (place - (lines - 1) / 2) / 72  # of an inch
    for artist in artists:
        inches = artist.get_figure().dpi_scale_trans
        artist.set_transform(artist.axes.transData + ScaledTranslation(right * middle, up * middle, inches))


@contextmanager
def panels(path: Path, count: int, columns: int = 0, height: float = 0.0) -> Iterator[list[Any]]:
    """So many axes in a grid that is about as wide as high, with one legend below, each name once.

    Args:
        columns: how many there are; 0: as many as make a square.
        height: of a panel, in inches; 0: as usual.
    """
    columns = columns or min(4, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    size = (8.0 if columns == 1 else 4.6 * columns, 0.9 + (height or (3.6 if columns == 1 else 3.1)) * rows)
    with saved_figure(path, "out", rows, columns, size=size, dpi=DPI, squeeze=False) as (figure, axes):
        for axis in axes.flat:
            axis.tick_params(labelsize="small")
        for axis in axes.flat[count:]:
            axis.set_axis_off()
        yield list(axes.flat[:count])
        entries: dict[str, Any] = {}
        for axis in axes.flat:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        if entries:
            fitting = int(figure.get_figwidth() / (INCHES_PER_LETTER * max(map(len, entries)) + 0.6))
            place = {"loc": "outside lower center", "ncols": max(1, min(len(entries), fitting))}
            figure.legend(entries.values(), entries.keys(), fontsize="small", handlelength=3.2, **place)


def set_title(
    axis: Any, summaries: Sequence[Summary], text: str, counts: Sequence[int] = (), what: str = ""
) -> None:
    """Title a panel: its comparison, where there are several, and what is shown of how many seeds or pairs.

    The title has as many lines as its width asks for.
    """
    text = ": ".join(filter(None, (summaries[0].comparison.name, text)))
    if what:
        low, high = (min(counts), max(counts)) if counts else (0, 0)
        number = f"{low if low == high else f'{low} to {high}'} {what}{'s' * (high != 1)}"
        text += ", " + number.replace(" ", "\N{NO-BREAK SPACE}")
    grid = axis.get_subplotspec().get_gridspec()
    letters = int(axis.get_figure().get_figwidth() / grid.ncols / INCHES_PER_LETTER)
    axis.set_title("\n".join(textwrap.wrap(text, letters)), fontsize="small")


def over_seeds(axis: Any, summaries: Sequence[Summary], text: str) -> None:
    """Title a panel whose values are those of the runs of each variant."""
    set_title(axis, summaries, text, [len(summary.values) for summary in summaries], "seed")


def over_pairs(axis: Any, summaries: Sequence[Summary], text: str) -> None:
    """Title a panel whose values are differences from each variant's baseline."""
    set_title(axis, summaries, text, [len(s.differences) for s in summaries if not s.is_baseline], "pair")


def set_labels(axis: Any, x: str, y: str, unit: str = "") -> None:
    """Say what the axes show; the unit of y has its own line. Layers, steps and heads are whole numbers."""
    axis.set_xlabel(x, fontsize="small")
    axis.set_ylabel(f"{y}\n({unit})" if unit else y, fontsize="small")
    if x in ("layer", "training step", "total heads of all layers"):
        whole_numbers(axis.xaxis)


def variant_rows(axis: Any, labels: Sequence[str]) -> None:
    """Make the y axis one of variants, the first at the top."""
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_yticks(range(len(labels)), labels, fontsize="small")


def band(
    axis: Any, points: dict[int, list[float]], place: int, lines: int, each: bool = False, **style: Any
) -> list[float]:
    """Draw mean and standard deviation over x; return the edges of what was drawn after the EARLY part.

    In a panel of more than MOST_BANDS lines, bars take the place of bands, which would hide one another: at
    every point with *each*, else at the last one. They are moved sideways a little.

    Args:
        points: values by x.
        place: of this line among those of its panel, from 0.
        lines: how many the panel has.
    """
    xs, means = list(points), [mean_of(values) for values in points.values()]
    around = [sd_of(values) if len(values) > 1 else 0.0 for values in points.values()]
    low, high = ([mean + sign * sd for mean, sd in zip(means, around, strict=True)] for sign in (-1, 1))
    style["markevery"] = math.ceil(len(xs) / MOST_MARKERS)  # dense ones hide the kind of line
    if lines <= MOST_BANDS:
        axis.plot(xs, means, **style)
        axis.fill_between(xs, low, high, color=style["color"], alpha=0.13, linewidth=0)
    else:
        last = (len(xs) - 1, len(xs))
        bars = axis.errorbar(xs, means, around, elinewidth=0.8, errorevery=1 if each else last, **style)
        move(bars.get_children(), place, lines, right=1.5)
    edges = [edge for x, *ends in zip(xs, low, high, strict=True) if x >= EARLY * xs[-1] for edge in ends]
    return [edge for edge in edges if math.isfinite(edge)]


def fit_to_late(axis: Any, edges: Sequence[float]) -> None:
    """Fit the y axis to *edges* where earlier points would make these unreadable, and say so."""
    low, high = axis.get_ylim()
    bottom, top = min(0.0, *edges, 0.0), max(0.0, *edges, 0.0)
    if high - low > 2 * (top - bottom) > 0:
        axis.set_ylim(bottom - 0.08 * (top - bottom), top + 0.08 * (top - bottom))
        axis.set_title(f"{axis.get_title()}\n(earlier values are outside)", fontsize="small")
