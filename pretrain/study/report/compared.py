"""Pictures of what is compared: schedules, results and differences, over tokens and scale."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from pretrain.study.report.figures import gap_over_tokens
from pretrain.study.report.panels import (
    SINGLE,
    band,
    fit_to_late,
    line_styles,
    move,
    over_pairs,
    over_seeds,
    panels,
    set_labels,
    set_title,
    variant_rows,
)
from pretrain.study.summaries import Summary, View
from pretrain.utils.plotting import count_axis
from pretrain.utils.text import human_number

SCALES_APART = 1.2
"""Models whose sizes differ by less than this factor are of one scale."""
_BLUE: dict[str, Any] = {"color": "tab:blue", "linestyle": "none"}
_MEAN = _BLUE | {"marker": "|", "markersize": 15, "markeredgewidth": 2.5}
_INTERVAL = _BLUE | {"marker": "s", "markersize": 5.5, "linewidth": 2, "capsize": 3, "elinewidth": 2}


def draw_schedules(view: View, path: Path) -> str:
    """Draw heads by layer, a panel for each comparison in which they differ (arXiv 2606.27449, figure 1)."""
    from matplotlib.ticker import NullLocator

    heads = {name: {h for s in of_one for h in s.schedules} for name, of_one in view.summaries.items()}
    shown = [name for name, schedules in heads.items() if len(schedules) > 1]
    if not shown:
        return "in every comparison all variants have the same heads"
    styles = line_styles(view)
    with panels(path, len(shown)) as axes:
        for axis, name in zip(axes, shown, strict=True):
            summaries = view.summaries[name]
            set_title(axis, summaries, "")
            axis.set_yscale("log", base=2)
            for place, summary in enumerate(summaries):
                style = styles[summary.variant] | {"drawstyle": "steps-mid"}
                for schedule in summary.schedules:
                    drawn = axis.plot(schedule, label=summary.label + summary.when, **style)
                    move(drawn, place, len(summaries), up=-2.0)
            counts = sorted({count for schedule in heads[name] for count in schedule})
            axis.set_yticks(counts, list(map(str, counts)))
            axis.yaxis.set_minor_locator(NullLocator())
            set_labels(axis, "layer", "heads of the layer (log)")
    return ""


def draw_results(view: View, path: Path) -> str:
    """Draw results and their mean, and beside them Δ with its 95 % interval, a row for each variant."""
    if not any(summary.values for summary in view.every):
        return "no run is finished"
    name, unit = view.words(view.measure)
    # Its unit is that of the study's measure.
    effect = view.study.file.effect if view.measure == view.study.file.measure else None
    height = 0.9 + 0.3 * max(map(len, view.summaries.values()))
    with panels(path, 2 * len(view.summaries), columns=2, height=height) as axes:
        for summaries, values, gaps in zip(view.summaries.values(), axes[::2], axes[1::2], strict=True):
            gaps.axvline(0, color="gray", linewidth=0.8)
            if effect:
                meant = f"within ± {effect:g}, the effect that the study is meant to see"
                gaps.axvspan(-effect, effect, color="gray", alpha=0.15, linewidth=0, label=meant)
            for row, summary in enumerate(summaries):
                for axis, sample in ((values, summary.values), (gaps, summary.differences)):
                    single = SINGLE | {"label": "one seed, or one pair of a seed"}
                    axis.plot(list(sample.values()), [row] * len(sample), **single)
                if summary.values:
                    values.plot([summary.values.mean], [row], label="mean of the seeds", **_MEAN)
                if found := summary.differences.interval:
                    around = {"xerr": [found.high - found.mean], "label": "mean of the pairs, 95 % interval"}
                    gaps.errorbar([found.mean], [row], **around, **_INTERVAL)
            variant_rows(values, [_with_runs(summary) for summary in summaries])
            variant_rows(gaps, [""] * len(summaries))
            for axis in (values, gaps):
                axis.grid(axis="y", linewidth=0.4, alpha=0.5)
            set_labels(values, f"{name} ({unit})", "")
            set_labels(gaps, f"Δ {name} ({unit}); {view.better} is better", "")
            over_seeds(values, summaries, "results")
            over_pairs(gaps, summaries, "Δ against the baseline")
    return ""


def _with_runs(summary: Summary) -> str:
    """The variant's label, and how many runs are finished, where some are not."""
    finished, every = len(summary.values), len(summary.runs)
    return summary.label + f" ({finished} of {every})" * (finished < every)


def _baseline(summary: Summary) -> str:
    """What is subtracted."""
    return f"{summary.baseline} (other seeds)" if summary.other_seeds else summary.baseline


def draw_gap_over_tokens(view: View, path: Path) -> str:
    """Draw Δ of the validation loss over tokens, mean ± sd over the pairs (arXiv 2606.27449, figure 3a)."""
    gaps = {
        name: [(summary, gap) for summary in summaries if (gap := gap_over_tokens(view, summary))]
        for name, summaries in view.summaries.items()
    }
    shown = [name for name, found in gaps.items() if found]
    if not shown:
        return "no pair of finished runs was validated at the same tokens"
    styles, (measure, unit) = line_styles(view), view.words(view.loss)
    with panels(path, len(shown)) as axes:
        for axis, name in zip(axes, shown, strict=True):
            over_pairs(axis, view.summaries[name], f"Δ {measure} ± sd")
            axis.axhline(0, color="gray", linewidth=0.8)
            edges: list[float] = []
            for place, (summary, gap) in enumerate(gaps[name]):
                style = styles[summary.variant] | {"label": f"{summary.variant} − {_baseline(summary)}"}
                edges += band(axis, gap, place, len(gaps[name]), **style)
            set_labels(axis, "tokens", f"Δ {measure}", unit)
            axis.set_xlim(left=0)
            count_axis(axis.xaxis)
            fit_to_late(axis, edges)
    return ""


def draw_gap_by_scale(view: View, path: Path) -> str:
    """Draw Δ by comparison, in order of size, of variants that several share (arXiv 2606.27449, figure 3b).

    No line joins the points: comparisons may differ in more than their size, and have baselines of their own.
    """
    every = {name: [size for s in of_one for size in s.parameters] for name, of_one in view.summaries.items()}
    sizes = {name: fmean(found) for name, found in every.items() if found}
    ordered = sorted(sizes, key=lambda name: sizes[name])
    shared: dict[str, dict[int, Summary]] = {}
    for summary in view.compared:
        if summary.comparison.name in sizes:
            shared.setdefault(summary.variant, {})[ordered.index(summary.comparison.name)] = summary
    shared = {variant: dict(sorted(found.items())) for variant, found in shared.items() if len(found) > 1}
    if not shared or sizes[ordered[-1]] < SCALES_APART * sizes[ordered[0]]:
        return "no variant was run at two scales (in several comparisons, with models of different sizes)"
    styles, (measure, unit) = line_styles(view), view.words(view.measure)
    with panels(path, 1) as (axis,):
        axis.axhline(0, color="gray", linewidth=0.8)
        for place, (variant, found) in enumerate(shared.items()):
            style = styles[variant] | {"capsize": 2, "elinewidth": 1, "linestyle": "none"}
            against = " or ".join(dict.fromkeys(map(_baseline, found.values())))
            intervals = [summary.differences.interval for summary in found.values()]
            bars = axis.errorbar(
                list(found),
                [summary.differences.mean for summary in found.values()],
                [each.high - each.mean if each else 0.0 for each in intervals],
                label=f"{variant} − {against}",
                **style,
            )
            move(bars.get_children(), place, len(shared), right=7)
        baselines = [view.summaries[name][0].comparison.baseline for name in ordered]
        ticks = [
            f"{human_number(sizes[name])}\n{name}\n(baseline {baseline})"
            for name, baseline in zip(ordered, baselines, strict=True)
        ]
        axis.set_xticks(range(len(ordered)), ticks)
        axis.margins(x=0.2)
        set_labels(axis, "parameters, by comparison", f"Δ {measure} ({unit})\n{view.better} is better")
        axis.set_title("Δ by scale: mean and 95 % interval over the pairs", fontsize="small")
    return ""
