"""Pictures of what is compared: schedules, results and differences, over tokens and scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pretrain.study.report.figures import gap_over_tokens
from pretrain.study.report.panels import (
    DPI,
    SINGLE,
    against,
    band,
    comparison_panels,
    counted,
    fit_to_late,
    layer_axis,
    legend,
    line_styles,
    move,
    over_pairs,
    over_seeds,
    set_labels,
    set_title,
    short_name,
    size_ticks,
)
from pretrain.study.report.summaries import Summary, View
from pretrain.study.statistics import Interval
from pretrain.utils.plotting import count_axis, saved_figure
from pretrain.utils.text import human_number

SCALES_APART = 1.2
"""Models whose sizes differ by less than this factor are of one scale."""
_BLUE: dict[str, Any] = {"color": "tab:blue", "linestyle": "none"}
_MEAN = _BLUE | {"marker": "|", "markersize": 15, "markeredgewidth": 2.5}
_INTERVAL = _BLUE | {"marker": "s", "markersize": 5.5, "linewidth": 2}


def draw_schedules(view: View, path: Path) -> str:
    """Draw heads by layer, a panel for each comparison whose variants differ in them (arXiv 2606.27449, figure 1)."""
    from matplotlib.ticker import NullLocator

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
            for place, summary in enumerate(summaries):
                style = styles[summary.variant] | {"drawstyle": "steps-mid"}
                for schedule in summary.schedules:
                    drawn = axis.plot(schedule, label=short_name(summary) + summary.when, **style)
                    move(drawn, place, len(summaries), up=-2.0)
            counts = sorted({count for s in summaries for schedule in s.schedules for count in schedule})
            axis.set_yticks(counts, [str(count) for count in counts])
            axis.yaxis.set_minor_locator(NullLocator())
            axis.set_ylabel("heads of the layer (log)", fontsize="small")
            layer_axis(axis)
        legend(figure, [axis for axis, _ in panels])
    return ""


def draw_results(view: View, path: Path) -> str:
    """Draw each seed's result with the mean, and beside it Δ by pair with its 95 % interval, a row for each variant."""
    shown = list(view.summaries.values())
    if not any(summary.values for summary in view.every):
        return "no run is finished"
    name, unit = view.words(view.measure)
    # Its unit is that of the study's measure.
    effect = view.study.effect if view.measure == view.study.measure else None
    heights = [0.3 * len(summaries) + 0.45 for summaries in shown]
    options: dict[str, Any] = {"dpi": DPI, "squeeze": False, "height_ratios": heights, "sharex": "col"}
    with saved_figure(path, "out", len(shown), 2, size=(11, sum(heights) + 1.6), **options) as (figure, axes):
        for (values, gaps), summaries in zip(axes, shown, strict=True):
            _results(values, gaps, summaries, effect)
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
        for axis, sample in ((values, summary.values), (gaps, summary.differences)):
            axis.plot(list(sample.values()), [place] * len(sample), **SINGLE)
        if summary.values:
            values.plot([summary.values.mean], [place], **_MEAN)
        if found := summary.differences.interval:
            gaps.errorbar([found.mean], [place], xerr=_around([found]), capsize=3, elinewidth=2, **_INTERVAL)
    labels = [short_name(summary) + _what_is_special(summary) for summary in summaries]
    values.set_yticks(range(len(summaries)), labels, fontsize="small")
    gaps.set_yticks(range(len(summaries)), [""] * len(summaries))
    for axis in (values, gaps):
        axis.set_ylim(len(summaries) - 0.4, -0.6)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.tick_params(axis="x", labelsize="small", labelbottom=True)
    set_title(values, over_seeds(summaries, "results"))
    set_title(gaps, over_pairs(summaries, "Δ against the baseline"))


def _around(intervals: Sequence[Interval | None]) -> list[list[float]]:
    """The lengths of error bars: below and above each mean, 0 without an interval."""
    below = [found.mean - found.low if found else 0.0 for found in intervals]
    above = [found.high - found.mean if found else 0.0 for found in intervals]
    return [below, above]


def _what_is_special(summary: Summary) -> str:
    """How many runs are finished, where some are not; and another baseline than the comparison's."""
    marks = []
    if not summary.is_baseline and summary.baseline != summary.comparison.baseline:
        marks.append(f"Δ against {summary.baseline}")
    if len(summary.values) < len(summary.runs):
        marks.append(f"{len(summary.values)} of {len(summary.runs)}")
    return f" ({', '.join(marks)})" if marks else ""


def _explain_results(figure: Any, effect: float | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {
        "one seed, or one pair of a seed": Line2D([], [], **SINGLE),
        "mean of the seeds": Line2D([], [], **_MEAN),
        "mean of the pairs, 95 % interval": Line2D([], [], **(_INTERVAL | {"linestyle": "-"})),
    }
    if effect:
        meant = f"within ± {effect:g}, the effect that the study is meant to see"
        entries[meant] = Patch(color="gray", alpha=0.3)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2, fontsize="small")


def draw_gap_over_tokens(view: View, path: Path) -> str:
    """Draw Δ of the validation loss over tokens, mean ± sd over the pairs (arXiv 2606.27449, figure 3a)."""
    shown = []
    for summaries in view.summaries.values():
        gaps = [(summary, gap) for summary in summaries if (gap := gap_over_tokens(view, summary))]
        shown += [(summaries, gaps)] * bool(gaps)
    if not shown:
        return "no pair of finished runs was validated at the same tokens"
    styles, (name, unit) = line_styles(view), view.words(view.loss)
    with comparison_panels(path, [summaries for summaries, _ in shown]) as (figure, panels):
        for (axis, summaries), (_, gaps) in zip(panels, shown, strict=True):
            set_title(axis, over_pairs(summaries, f"Δ {name}"))
            axis.axhline(0, color="gray", linewidth=0.8)
            edges: list[float] = []
            for place, (summary, gap) in enumerate(gaps):
                style = styles[summary.variant] | {"label": against(summary)}
                edges += band(axis, gap, place, len(gaps), **style)
            set_labels(axis, "tokens", f"Δ {name}", unit)
            axis.set_xlim(left=0)
            count_axis(axis.xaxis)
            fit_to_late(axis, edges)
        legend(figure, [axis for axis, _ in panels], "± 1 sd over the pairs")
    return ""


def draw_gap_by_scale(view: View, path: Path) -> str:
    """Draw Δ over parameters for variants that several comparisons share (arXiv 2606.27449, figure 3b).

    Where two comparisons are of one size, they differ in something else too, and no line joins the sizes. Nor does one
    join differences from several baselines; where comparisons have baselines of their own, the ticks name them.
    """
    by_size = scales(view)
    size_of = {name: size for size, names in by_size for name in names}
    shared: dict[str, dict[str, Summary]] = {}
    for summary in view.compared:
        if summary.comparison.name in size_of:
            shared.setdefault(summary.variant, {})[summary.comparison.name] = summary
    shared = {
        variant: found for variant, found in shared.items() if len({size_of[name] for name in found}) > 1
    }
    if not shared:
        return "no variant was run at two scales (comparisons that share its name, with models of different sizes)"
    styles, (name, unit) = line_styles(view), view.words(view.measure)
    slots = max(len(names) for _, names in by_size)
    with saved_figure(path, "out", size=(9, 5), dpi=DPI) as (figure, axis):
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set_xscale("log")
        size_ticks(
            axis, {size: "\n".join([human_number(size), *_named(view, names)]) for size, names in by_size}
        )
        for place, (variant, found) in enumerate(shared.items()):
            style = styles[variant] | {"capsize": 2, "elinewidth": 1}
            if slots > 1 or len({summary.baseline for summary in found.values()}) > 1:
                style["linestyle"] = "none"
            label: str | None = _against_each(found)
            # Of several comparisons of one size the first ones make a line, then the second ones, and so on.
            for slot in range(slots):
                drawn = [found[names[slot]] for _, names in by_size if names[slot:] and names[slot] in found]
                if drawn:
                    bars = axis.errorbar(
                        [size_of[summary.comparison.name] for summary in drawn],
                        [summary.differences.mean for summary in drawn],
                        _around([summary.differences.interval for summary in drawn]),
                        label=label,
                        **style,
                    )
                    across = len(shared) + 1
                    move(bars.get_children(), slot * across + place, slots * across - 1, right=7)
                    label = None
        set_labels(
            axis,
            "parameters (log)" + ", and comparisons of this size from left to right" * (slots > 1),
            f"Δ {name} ({unit})\n{view.better} is better",
        )
        pairs = [len(summary.differences) for found in shared.values() for summary in found.values()]
        set_title(axis, f"Δ by scale: mean and 95 % interval, {counted(pairs, 'pair')}")
        legend(figure, [axis])
    return ""


def scales(view: View) -> list[tuple[float, list[str]]]:
    """Sizes of the comparisons' models in parameters, ascending, each with the comparisons of about this size."""
    sizes: dict[str, float] = {}
    for comparison, summaries in view.summaries.items():
        own = [size for summary in summaries for size in summary.parameters]
        if own:
            sizes[comparison] = fmean(own)
    found: list[tuple[float, list[str]]] = []
    for comparison in sorted(sizes, key=lambda name: sizes[name]):
        if found and sizes[comparison] < SCALES_APART * found[-1][0]:
            found[-1][1].append(comparison)
        else:
            found.append((sizes[comparison], [comparison]))
    return found


def _named(view: View, names: Sequence[str]) -> list[str]:
    """The comparisons' names, each with its baseline's in a line of its own where not all have the same."""
    if len({comparison.baseline for comparison in view.study.comparisons}) == 1:
        return list(names)
    return [line for name in names for line in (name, f"(baseline {view.study.comparison(name).baseline})")]


def _against_each(summaries: dict[str, Summary]) -> str:
    """What is subtracted from what in several comparisons, by their names, which may have baselines of their own."""
    found = list(summaries.values())
    if len({summary.baseline for summary in found}) == 1:
        return against(found[0])
    if all(summary.baseline == summary.comparison.baseline for summary in found):
        return f"{short_name(found[0])} − baseline"
    each = ", ".join(f"{summary.baseline} ({name})" for name, summary in summaries.items())
    return f"{short_name(found[0])} − {each}"
