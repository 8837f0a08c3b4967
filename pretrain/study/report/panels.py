"""What the pictures of a report share: a panel for each comparison, line styles, bands, ticks and the legend below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.study.report.summaries import Summary, View
from pretrain.study.statistics import mean_of, sd_of
from pretrain.utils.plotting import saved_figure, whole_numbers

DPI = 110
LINE_STYLES = ("--", "-.", ":", "-")
MARKERS = ("s", "^", "D", "v", "P", "X", "*", "<", "d", ">")
BASELINES: tuple[tuple[Any, str], ...] = (
    ("-", "o"),
    ((0, (6, 1.5)), "h"),
    ((0, (4, 1, 1, 1)), "p"),
    ((0, (1, 0.6)), "8"),
)
"""Line style and marker of a first, second, … baseline of one panel."""
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

Panel = tuple[Any, list[Summary]]
"""Axes, and the variants of the comparison that they show."""


def line_styles(view: View) -> dict[str, dict[str, Any]]:
    """A style for each variant's name, the same in all pictures: baselines black, others in colours.

    Of two variants that follow one another one is dark and one bright. Two baselines are drawn alike only where no
    comparison has both.
    """
    baselines = dict.fromkeys(s.variant for s in view.every if s.variant == s.comparison.baseline)
    others = dict.fromkeys(s.variant for s in view.every if s.variant not in baselines)
    together = [{summary.variant for summary in summaries} for summaries in view.summaries.values()]
    places: dict[str, int] = {}
    for name in baselines:
        taken = {places[other] for names in together if name in names for other in names & places.keys()}
        places[name] = next(place for place in range(len(baselines)) if place not in taken)
    styles = {}
    for name, place in places.items():
        line, marker = BASELINES[place % len(BASELINES)]
        styles[name] = {"color": "black", "linestyle": line, "marker": marker, **WIDTHS}
    for index, name in enumerate(others):
        place = index // 2 + (index % 2) * ((len(others) + 1) // 2)
        styles[name] = line_style(index, len(others)) | {"color": line_style(place, len(others))["color"]}
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
def comparison_panels(path: Path, shown: Sequence[list[Summary]]) -> Iterator[tuple[Any, list[Panel]]]:
    """A panel for each comparison, in a grid that is about as wide as high."""
    columns = next(columns for columns, most in ((1, 1), (2, 4), (3, 9), (4, math.inf)) if len(shown) <= most)
    rows = math.ceil(len(shown) / columns)
    size = (8.0 if columns == 1 else 4.6 * columns, 0.9 + (3.6 if columns == 1 else 3.1) * rows)
    with saved_figure(path, "out", rows, columns, size=size, dpi=DPI, squeeze=False) as (figure, axes):
        panels = list(zip(axes.flat, shown, strict=False))
        for axis, _ in panels:
            axis.tick_params(labelsize="small")
        for axis in axes.flat[len(shown) :]:
            axis.set_axis_off()
        yield figure, panels


def set_title(axis: Any, text: str) -> None:
    """Set a panel's title, in as many lines as its width asks for."""
    grid = axis.get_subplotspec().get_gridspec()
    letters = int(axis.get_figure().get_figwidth() / grid.ncols / INCHES_PER_LETTER)
    axis.set_title("\n".join(textwrap.wrap(text, letters)), fontsize="small")


def set_labels(axis: Any, x: str, y: str, unit: str = "") -> None:
    """Say what the axes show; the unit of y is in a line of its own."""
    axis.set_xlabel(x, fontsize="small")
    axis.set_ylabel(f"{y}\n({unit})" if unit else y, fontsize="small")


def over_seeds(summaries: Sequence[Summary], text: str) -> str:
    """A panel's title: the comparison, what is shown, and of how many runs of each variant."""
    return titled(summaries, f"{text}, {counted([len(s.values) for s in summaries], 'seed')}")


def over_pairs(summaries: Sequence[Summary], text: str) -> str:
    """A panel's title: the comparison, what is shown, and of how many pairs of each variant."""
    pairs = [len(summary.differences) for summary in summaries if not summary.is_baseline]
    return titled(summaries, f"{text}, {counted(pairs, 'pair')}")


def titled(summaries: Sequence[Summary], text: str) -> str:
    """A panel's title: the comparison, where there are several, and what is shown."""
    name = summaries[0].comparison.name
    return f"{name}: {text}" if name else text


def counted(counts: Sequence[int], what: str) -> str:
    """How many there are of something, such as 4 seeds or 3 to 4 pairs, in one word for the sake of line ends."""
    if not counts:
        return f"no {what}"
    low, high = min(counts), max(counts)
    text = f"{low if low == high else f'{low} to {high}'} {what}{'s' * (high != 1)}"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def short_name(summary: Summary) -> str:
    """The variant's name, and whether its runs have other seeds."""
    return f"{summary.variant} (other seeds)" if summary.other_seeds else summary.variant


def against(summary: Summary) -> str:
    """What is subtracted from what."""
    return f"{short_name(summary)} − {summary.baseline}"


def legend(figure: Any, axes: Sequence[Any], bands: str = "", singles: str = "") -> None:
    """One legend below all panels, each name once, in as many columns as fit.

    Args:
        bands: what a band around a line, or a bar, means, where there is one.
        singles: what a single small circle means; empty where there is none.
    """
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    drawn = {type(collection) for axis in axes for collection in axis.collections} if bands else set()
    if PolyCollection in drawn or any(issubclass(kind, PolyCollection) for kind in drawn):
        entries[f"band: {bands}"] = Patch(color="gray", alpha=0.4)
    if LineCollection in drawn:
        entries[f"bar: {bands}"] = Line2D([], [], color="gray", marker="|", markersize=9, linestyle="none")
    if singles:
        entries[singles] = Line2D([], [], **(SINGLE | {"markersize": 3}))
    if not entries:
        return
    fitting = figure.get_figwidth() / (INCHES_PER_LETTER * max(map(len, entries)) + 0.6)
    columns = max(1, min(len(entries), int(fitting)))
    place = {"loc": "outside lower center", "ncols": columns, "handlelength": 3.2}
    figure.legend(entries.values(), entries.keys(), fontsize="small", **place)


def band(
    axis: Any, points: dict[int, list[float]], place: int, lines: int, each: bool = False, **style: Any
) -> list[float]:
    """Draw mean and standard deviation over an x axis; return the edges of what was drawn after the EARLY part.

    In a panel of more than MOST_BANDS lines, bars take the place of bands, which would hide one another. They stand
    beside one another to the right of the last point, or with *each* at every point, moved sideways a little.

    Args:
        points: values by x.
        place: of this line among those of its panel, from 0.
        lines: how many the panel has.
    """
    xs, means = list(points), [mean_of(values) for values in points.values()]
    around = [sd_of(values) if len(values) > 1 else 0.0 for values in points.values()]
    low = [mean - sd for mean, sd in zip(means, around, strict=True)]
    high = [mean + sd for mean, sd in zip(means, around, strict=True)]
    style = {"markevery": math.ceil(len(xs) / MOST_MARKERS)} | style  # dense ones hide the kind of line
    if lines > MOST_BANDS and each:
        beside = [x + 0.4 * ((place + 0.5) / lines - 0.5) for x in xs]
        axis.errorbar(beside, means, around, capsize=0, elinewidth=0.8, **style)
    else:
        axis.plot(xs, means, **style)
    if lines <= MOST_BANDS and any(around):
        axis.fill_between(xs, low, high, color=style["color"], alpha=0.13, linewidth=0)
    if lines > MOST_BANDS and not each:
        right = xs[-1] + 0.014 * (place + 1) * (xs[-1] or 1)
        bar = style | {"linestyle": "none", "label": None}
        axis.errorbar([right], means[-1:], around[-1:], capsize=2, elinewidth=1.2, **bar)
        low, high = [*means[:-1], low[-1]], [*means[:-1], high[-1]]
    edges = [edge for x, *ends in zip(xs, low, high, strict=True) if x >= EARLY * xs[-1] for edge in ends]
    return [edge for edge in edges if math.isfinite(edge)]


def fit_to_late(axis: Any, edges: Sequence[float]) -> None:
    """Fit the y axis to *edges* where earlier points would make these unreadable, and say so."""
    low, high = axis.get_ylim()
    if not edges:
        return
    bottom, top = min(0.0, *edges), max(0.0, *edges)
    if high - low > 2 * (top - bottom) > 0:
        axis.set_ylim(bottom - 0.08 * (top - bottom), top + 0.08 * (top - bottom))
        axis.set_title(f"{axis.get_title()}\n(earlier values are outside)", fontsize="small")


def layer_axis(axis: Any) -> None:
    """Make the x axis one of layers."""
    axis.set_xlabel("layer", fontsize="small")
    whole_numbers(axis.xaxis)


def size_ticks(axis: Any, labels: dict[float, str]) -> None:
    """Ticks on a logarithmic x axis at given places; texts that would lie on one another are one, between them.

    So no size is left out: 30 and 32 side by side are the tick "30, 32".
    """
    from matplotlib.ticker import NullLocator

    places = sorted(labels)
    kept: list[list[float]] = []
    for place in places:
        if not kept or math.log(place / kept[-1][0]) > 0.05 * math.log(places[-1] / places[0]):
            kept.append([place])
        else:
            kept[-1].append(place)
    between = "\n" if any("\n" in label for label in labels.values()) else ", "
    middles = [math.exp(mean_of(map(math.log, near))) for near in kept]
    axis.set_xticks(middles, [between.join(labels[place] for place in near) for near in kept])
    axis.xaxis.set_minor_locator(NullLocator())
