"""Pictures of a growth report: how heads grew, and what each is worth. Layers differ in line style, not in
hue only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.growth.record import GrowthState
from pretrain.growth.report.worth import SMALL_INCREASE, SMALL_SHARE, HeadWorths
from pretrain.utils.plotting import logarithmic, saved_figure, whole_numbers

LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Series = tuple[list[int], list[float]]
"""Steps, and a value at each."""


def draw_growth(
    record: GrowthState, rows: Sequence[dict[str, Any]], heads: Sequence[int], step: int, path: Path
) -> Path:
    """Draw heads per layer over training steps, with Γ, and λ_max with its threshold, of every layer beneath.

    Args:
        record: the checkpoint's; without checks in *rows* the figures of its events are drawn.
        rows: of metrics.jsonl, up to the step.
        heads: head count of each layer at the step.
        step: of the checkpoint.

    Raises:
        UserError: the file cannot be written.
    """
    with saved_figure(path, "out", 3, size=(8, 9), dpi=120, sharex=True) as (figure, axes):
        for layer, count in enumerate(heads):
            style = _style(layer, len(heads))
            steps, counts = _heads(record, layer, count, step)
            axes[0].plot(steps, counts, drawstyle="steps-post", label=f"layer {layer}", **style)
            for axis, name in ((axes[1], "gamma"), (axes[2], "lambda_max")):
                steps, values = _figure_of(record, rows, layer, name)
                axis.plot(steps, values, marker=MARKERS[layer % len(MARKERS)], markersize=3, **style)
            threshold = record.layers[layer].thresholds
            if threshold is not None and steps:
                axes[2].axhline(threshold[0], linewidth=0.7, alpha=0.6, **style)
        axes[0].set_ylabel("heads of the layer")
        whole_numbers(axes[0].yaxis)
        axes[0].set_ylim(bottom=0)
        axes[1].set_ylabel("Γ")
        axes[2].set_ylabel("λ_max\nthin: threshold θ_w")
        for axis in axes[1:]:
            drawn = [value for line in axis.lines for value in line.get_ydata()]
            if drawn and min(drawn) > 0:
                logarithmic(axis)
        axes[2].set_xlabel("training step")
        whole_numbers(axes[2].xaxis)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return path


def _style(layer: int, layers: int) -> dict[str, Any]:
    """Colours from dark to bright, so that they differ in greyscale; neighbours have other line styles,
    too."""
    from matplotlib import colormaps

    color = colormaps["viridis"](0.85 * layer / max(1, layers - 1))
    return {"color": color, "linestyle": LINE_STYLES[layer % len(LINE_STYLES)]}


def _heads(record: GrowthState, layer: int, count: int, step: int) -> Series:
    events = record.of_layer(layer)
    first = events[0].heads_before if events else count
    steps = [0, *(event.step for event in events), step]
    return steps, [first, *(event.heads for event in events), count]


def _figure_of(record: GrowthState, rows: Sequence[dict[str, Any]], layer: int, name: str) -> Series:
    """A figure of the layer from the checks, or from the events where there is no check."""
    key = f"growth/{name}/layer_{layer}"
    checks = [
        (row["step"], row[key])
        for row in rows
        if type(row.get(key)) in (int, float) and math.isfinite(row[key])
    ]
    if not checks:
        checks = [(event.step, getattr(event, name)) for event in record.of_layer(layer)]
    return [step for step, _ in checks], [value for _, value in checks]


def draw_worths(found: HeadWorths, path: Path) -> Path:
    """Draw every head's worth by layer, and the loss increase as heads are removed, smallest worth first.

    Where values differ by more than a factor of ten, the y axis is linear around zero and logarithmic beyond:
    worths may be negative.

    Raises:
        UserError: the file cannot be written.
    """
    with saved_figure(path, "out", 1, 2, size=(11, 4.5), dpi=120) as (_, (strip, curve)):
        for layer, worths in enumerate(found.worths):
            places = [layer + 0.5 * (head + 0.5) / len(worths) - 0.25 for head in range(len(worths))]
            label = {"label": "a head, ± one standard error"} if not layer else {}
            style = {"fmt": "o", "markersize": 3.5, "color": "black", "ecolor": "0.6", "linewidth": 0.8}
            strip.errorbar(places, worths, _finite(found.errors[layer]), **style, **label)
            label = {"label": "median of the layer"} if not layer else {}
            strip.hlines(median(worths), layer - 0.35, layer + 0.35, color="0.4", linewidth=2, **label)
        every = [worth for worths in found.worths for worth in worths]
        _symmetric(strip, SMALL_SHARE * max(every), every)
        strip.axhline(0, color="0.6", linewidth=0.7)
        strip.set_xlabel("layer")
        whole_numbers(strip.xaxis)
        strip.set_ylabel(f"worth (nats per {found.per})\nloss without the head − loss with it")
        strip.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        increases = [100 * point.increase for point in found.curve]
        shares = [100 * point.share for point in found.curve]
        curve.plot(shares, increases, "ko-", markersize=4, label="loss without them")
        bound = {"color": "0.4", "linestyle": "--", "label": f"{SMALL_INCREASE:.0%} more loss"}
        curve.axhline(100 * SMALL_INCREASE, **bound)
        _symmetric(curve, 100 * SMALL_INCREASE, increases)
        curve.set_xlabel("heads removed, smallest worth first (% of all)")
        curve.set_ylabel("increase of the held-out loss (%)")
        curve.set_xlim(0, 100)
        curve.legend(fontsize="small")
    return path


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else 0.0 for value in values]


def _symmetric(axis: Any, linear: float, values: Sequence[float]) -> None:
    """A y axis that is linear up to ± *linear* and logarithmic beyond, if *values* go ten times as far."""
    if 0 < 10 * linear < max(map(abs, values)):
        axis.set_yscale("symlog", linthresh=linear)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
