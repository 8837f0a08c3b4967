"""Pictures of what is compared: schedules, results and differences, over tokens, scale and total heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pretrain.study.report.panels import (
    DPI,
    SINGLE,
    against,
    against_each,
    band,
    comparison_panels,
    counted,
    fit_to_late,
    layer_axis,
    legend,
    line_style,
    line_styles,
    no_ticks,
    over_pairs,
    over_seeds,
    set_title,
    short_name,
    size_ticks,
    what_is_special,
)
from pretrain.study.report.summaries import (
    ORDERS,
    Summary,
    View,
    gap_over_tokens,
    grown,
    scales,
    total_heads,
)
from pretrain.study.statistics import Interval, mean_of
from pretrain.utils.plotting import count_axis, saved_figure
from pretrain.utils.text import human_number

GROWING = {"linestyle": "none", "markerfacecolor": "none", "markersize": 7}
_MEAN: dict[str, Any] = {
    "color": "tab:blue", "marker": "|", "markersize": 15, "markeredgewidth": 2.5, "linestyle": "none",
}  # fmt: skip
_INTERVAL: dict[str, Any] = {
    "color": "tab:blue", "marker": "s", "markersize": 5.5, "linewidth": 2, "linestyle": "none",
}  # fmt: skip


def draw_schedules(view: View, path: Path) -> str:
    """Draw heads by layer, a panel for each comparison whose variants differ in them (arXiv 2606.27449, figure 1)."""
    shown = [
        summaries
        for summaries in view.summaries.values()
        if len({schedule for summary in summaries for schedule in summary.schedules}) > 1
    ]
    if not shown:
        return "in every comparison all variants have the same heads"
    styles = line_styles(view)
    with comparison_panels(path, shown) as (figure, panels):
        for axis, summaries in panels:
            set_title(axis, summaries[0].comparison.name)
            axis.set_yscale("log", base=2)
            counts = sorted({count for s in summaries for schedule in s.schedules for count in schedule})
            closest = min((math.log2(b / a) for a, b in pairwise(counts)), default=1.0)
            apart = min(0.05, 0.25 / len(summaries), 0.4 * closest / len(summaries))
            for place, summary in enumerate(summaries):
                moved = 2 ** (apart * ((len(summaries) - 1) / 2 - place))
                for schedule in summary.schedules:
                    heads = [count * moved for count in schedule]
                    axis.plot(
                        heads,
                        drawstyle="steps-mid",
                        label=short_name(summary) + summary.when,
                        **styles[summary.variant],
                    )
            axis.set_yticks(counts, [str(count) for count in counts])
            axis.yaxis.set_minor_locator(no_ticks())
            axis.set_ylabel("heads of the layer (log)", fontsize="small")
            layer_axis(axis)
        legend(figure, panels)
    return ""


def draw_results(view: View, path: Path) -> str:
    """Draw each seed's result with the mean, and beside it Δ by pair with its 95 % interval, a row for each variant."""
    shown = list(view.summaries.values())
    if not any(summary.values for summaries in shown for summary in summaries):
        return "no run is finished"
    name, unit = view.words(view.measure)
    effect = (
        view.study.effect if view.measure == view.study.measure else None
    )  # its unit is the study's measure's
    heights = [0.3 * len(summaries) + 0.45 for summaries in shown]
    size = (11, sum(heights) + 1.6)
    with saved_figure(
        path, "out", len(shown), 2, size=size, dpi=DPI, squeeze=False, height_ratios=heights
    ) as (figure, axes):
        for (values, gaps), summaries in zip(axes, shown, strict=True):
            if gaps is not axes[0][1]:
                gaps.sharex(axes[0][1])
            _results(values, gaps, summaries, effect)
            set_title(values, over_seeds(summaries, "results"))
            set_title(gaps, over_pairs(summaries, "Δ against the baseline"))
        axes[-1][0].set_xlabel(f"{name} ({unit})")
        axes[-1][1].set_xlabel(f"Δ {name} ({unit}); {view.better} is better")
        _explain_results(figure, effect)
    return ""


def _results(values: Any, gaps: Any, summaries: Sequence[Summary], effect: float | None) -> None:
    """Fill a row of panels: the results of the variants, and their differences."""
    gaps.axvline(0, color="gray", linewidth=0.8)
    if effect:
        gaps.axvspan(-effect, effect, color="gray", alpha=0.15, linewidth=0)
    for place, summary in enumerate(summaries):
        seeds, pairs = list(summary.values.values()), list(summary.differences.values())
        values.plot(seeds, [place] * len(seeds), **SINGLE)
        gaps.plot(pairs, [place] * len(pairs), **SINGLE)
        if summary.mean is not None:
            values.plot([summary.mean], [place], **_MEAN)
        if summary.interval:
            _interval(gaps, place, summary.interval)
    labels = [short_name(s) + what_is_special(s) for s in summaries]
    values.set_yticks(range(len(summaries)), labels, fontsize="small")
    gaps.set_yticks(range(len(summaries)), [""] * len(summaries))
    for axis in (values, gaps):
        axis.set_ylim(len(summaries) - 0.4, -0.6)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.tick_params(axis="x", labelsize="small")


def _interval(axis: Any, place: float, interval: Interval) -> None:
    around = [[interval.mean - interval.low], [interval.high - interval.mean]]
    axis.errorbar([interval.mean], [place], xerr=around, capsize=3, elinewidth=2, **_INTERVAL)


def _explain_results(figure: Any, effect: float | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], **SINGLE), Line2D([], [], **_MEAN)]
    handles.append(Line2D([], [], **(_INTERVAL | {"linestyle": "-"})))
    labels = ["one seed, or one pair of a seed", "mean of the seeds", "mean of the pairs, 95 % interval"]
    if effect:
        handles.append(Patch(color="gray", alpha=0.3))
        labels.append(f"within ± {effect:g}, the effect that the study is meant to see")
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")


def draw_gap_over_tokens(view: View, path: Path) -> str:
    """Draw Δ of the validation loss over tokens, mean ± sd over the pairs (arXiv 2606.27449, figure 3a)."""
    shown, gaps = [], {}
    for summaries in view.summaries.values():
        found = {
            summary.variant: gap_over_tokens(view, summary) for summary in summaries if summary.differences
        }
        gaps[summaries[0].comparison.name] = found
        shown += [summaries] * any(found.values())
    if not shown:
        return "no pair of finished runs was validated at the same tokens"
    styles, (name, unit) = line_styles(view), view.words(view.loss)
    with comparison_panels(path, shown) as (figure, panels):
        for axis, summaries in panels:
            set_title(axis, over_pairs(summaries, f"Δ {name}"))
            axis.axhline(0, color="gray", linewidth=0.8)
            edges: list[float] = []
            found = gaps[summaries[0].comparison.name]
            drawn = [summary for summary in summaries if found.get(summary.variant)]
            for place, summary in enumerate(drawn):
                gap, style = found[summary.variant], styles[summary.variant]
                edges += band(axis, gap, place, len(drawn), label=against(summary), **style)
            axis.set_xlabel("tokens", fontsize="small")
            axis.set_ylabel(f"Δ {name}\n({unit})", fontsize="small")
            axis.set_xlim(left=0)
            count_axis(axis.xaxis)
            fit_to_late(axis, edges)
        legend(figure, panels, "± 1 sd over the pairs")
    return ""


def draw_gap_by_scale(view: View, path: Path) -> str:
    """Draw Δ over parameters for variants that several comparisons share (arXiv 2606.27449, figure 3b).

    Where two comparisons are of one size, they differ in something else too, and no line joins the sizes. Nor does one
    join differences from several baselines; where comparisons have baselines of their own, the ticks name them.
    """
    by_size = scales(view)
    shared: dict[str, dict[str, Summary]] = {}
    for summary in view.compared:
        shared.setdefault(summary.variant, {})[summary.comparison.name] = summary
    shared = {
        variant: found
        for variant, found in shared.items()
        if sum(any(name in found for name in names) for _, names in by_size) > 1
    }
    if not shared:
        return "no variant was run at two scales (comparisons that share its name, with models of different sizes)"
    styles, (name, unit) = line_styles(view), view.words(view.measure)
    with saved_figure(path, "out", size=(9, 5), dpi=DPI) as (figure, axis):
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set_xscale("log")
        several = any(len(names) > 1 for _, names in by_size)
        slots = (len(shared) + 1) * max(len(names) for _, names in by_size)
        apart = min(0.012, 0.25 / slots) * math.log(by_size[-1][0] / by_size[0][0])
        for place, (variant, found) in enumerate(shared.items()):
            style = dict(styles[variant])
            if several or len({summary.baseline for summary in found.values()}) > 1:
                style["linestyle"] = "none"
            sizes, drawn = [], []
            for size, names in by_size:
                for index, comparison in enumerate(names):
                    if comparison in found:
                        slot = index * (len(shared) + 1) + place - ((len(shared) + 1) * len(names) - 2) / 2
                        sizes.append(size * math.exp(apart * slot))
                        drawn.append(found[comparison])
            means = [mean_of(summary.differences.values()) for summary in drawn]
            around = [
                [s.interval.mean - s.interval.low if s.interval else 0.0 for s in drawn],
                [s.interval.high - s.interval.mean if s.interval else 0.0 for s in drawn],
            ]
            axis.errorbar(sizes, means, around, capsize=2, elinewidth=1, label=against_each(found), **style)
        labels = {
            size: "\n".join([human_number(size), *_with_baselines(view, names)]) for size, names in by_size
        }
        size_ticks(axis, labels)
        axis.set_xlabel("parameters (log)" + ", and comparisons of this size from left to right" * several)
        axis.set_ylabel(f"Δ {name} ({unit})\n{view.better} is better")
        pairs = [len(summary.differences) for found in shared.values() for summary in found.values()]
        set_title(axis, f"Δ by scale: mean and 95 % interval, {counted(pairs, 'pair')}")
        legend(figure, [(axis, [])])
    return ""


def _with_baselines(view: View, names: Sequence[str]) -> list[str]:
    """The comparisons' names, each with its baseline's in a line of its own where not all have the same."""
    if len({comparison.baseline for comparison in view.study.comparisons}) == 1:
        return list(names)
    return [line for name in names for line in (name, f"(baseline {view.study.comparison(name).baseline})")]


def draw_total_heads(view: View, path: Path) -> str:
    """Draw results over the total number of heads, a line for each order of them (the head-progression note's figure).

    Only variants that differ from the baseline in their heads alone are drawn, and runs whose heads grow, one by one.
    """
    shown = []
    for summaries in view.summaries.values():
        if len({total for points in total_heads(summaries).values() for total, _ in points}) > 1:
            shown.append(summaries)
    if not shown:
        return "in every comparison all finished variants have the same total number of heads"
    name, unit = view.words(view.measure)
    orders = {kind: line_style(place, len(ORDERS)) for place, kind in enumerate(ORDERS)}
    styles = {grown(variant): style for variant, style in line_styles(view).items()}
    if any(summary.first.growth.active for summaries in shown for summary in summaries):
        # Grown variants have the colours: an order's could be one of theirs.
        orders = {kind: orders[kind] | {"color": str(0.2 * place)} for place, kind in enumerate(ORDERS)}
    styles |= orders | {"mixed": orders["mixed"] | {"linestyle": "none"}}
    with comparison_panels(path, shown) as (figure, panels):
        for axis, summaries in panels:
            set_title(axis, over_seeds(summaries, name))
            axis.set_xscale("log", base=2)
            found = total_heads(summaries)
            totals = sorted({total for points in found.values() for total, _ in points})
            apart = 0.012 * math.log(totals[-1] / totals[0])
            for place, (kind, points) in enumerate(found.items()):
                moved = math.exp(apart * (place - (len(found) - 1) / 2))
                _over_totals(axis, kind, [(total * moved, value) for total, value in points], styles[kind])
            size_ticks(axis, {total: f"{total:g}" for total in totals})
            axis.set_xlabel("total heads of all layers (log)", fontsize="small")
            axis.set_ylabel(f"{name}\n({unit})", fontsize="small")
        legend(figure, panels, singles="one seed")
    return ""


def _over_totals(axis: Any, kind: str, points: list[tuple[float, float]], style: dict[str, Any]) -> None:
    """Draw the runs of an order as circles and their means as a line; runs that grow have no means."""
    if kind not in ORDERS:
        axis.plot(*zip(*points, strict=True), label=kind, **(style | GROWING))
        return
    by_total: dict[float, list[float]] = {}
    for total, value in sorted(points):
        by_total.setdefault(total, []).append(value)
    axis.plot(list(by_total), [mean_of(values) for values in by_total.values()], label=kind, **style)
    single = SINGLE | {"markersize": 3.5, "color": style["color"]}
    axis.plot(*zip(*points, strict=True), **single)
