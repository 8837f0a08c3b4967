"""Prints a plan of a study's size."""

from __future__ import annotations

import math

from pretrain.study.power.plan import PowerReport
from pretrain.study.statistics import MOST_PAIRS
from pretrain.utils.tables import aligned
from pretrain.utils.text import human_seconds


def report_lines(report: PowerReport) -> list[str]:
    """The report in lines: words first, then a table of ways to compare and one of sizes, then costs."""
    return [
        *_answer(report),
        *_pairing(report),
        "",
        *_ways(report),
        "",
        *_sizes(report),
        "",
        *_costs(report),
    ] + [f"note     {note}" for note in report.notes]


def _answer(report: PowerReport) -> list[str]:
    result = report.measure if report.last == 1 else f"{report.measure} (mean of the last {report.last})"
    interval = ""
    if report.sd_source != "stated":
        first = report.pilots[0]
        interval = f" (95 % interval {_sd(report.sd_low)} to {_sd(report.sd_high)})"
        where = f"from {first.pairs} pairs of {_some(len(first.differences), 'variant')} in {first.folder}"
    else:
        where = "as stated"
    lines = [f"spread   sd {_sd(report.sd)}{interval} of paired differences of {result}, {where}"]
    test = f"with a power of {report.power:.0%}, by a two-sided paired t-test at 5 %"
    if report.effect is None:
        lines.append("needed   not known: the study names no effect; give --effect")
    else:
        span = ""
        if report.sd_source != "stated":
            span = f" ({_pairs(report.needed_low)} to {_pairs(report.needed_high)} over the interval of the spread)"
        lines.append(f"needed   {_pairs(report.needed)} seeds{span} to find {report.effect:g} {test}")
    found = (
        "nothing: one pair has no spread"
        if math.isnan(report.detectable)
        else f"{_sd(report.detectable)} or more"
    )
    if report.effect is not None and report.detectable <= report.effect:
        found += ", so the effect"
    return [*lines, f"finds    with the {_some(report.seeds, 'seed')} of {report.study}: {found}"]


def _pairing(report: PowerReport) -> list[str]:
    lines = []
    for spread in report.pilots:
        if not math.isnan(spread.gain):
            lines.append(
                f"pairing  common random numbers: {_sd(spread.sd)} in place of {_sd(spread.unpaired)} for runs of any "
                f"seeds, a ratio of {spread.gain:.2f}; {spread.gain**2:.2g} of the seeds ({spread.folder})"
            )
        if spread.other_seeds:
            lines.append(
                f"         not paired in anything, and not in the spread: {', '.join(spread.other_seeds)} "
                f"({_some(spread.other_pairs, 'pair')} of other seeds)"
            )
        windows = spread.windows
        if windows and spread.averages.get(1):
            share = min(1.0, windows.error**2 / spread.averages[1] ** 2)  # two estimates
            lines.append(
                f"windows  {windows.validated:,} windows are {share:.0%} of the variance between seeds (sd "
                f"{_sd(windows.error)}), by {windows.windows:,} of {windows.text}; another text of that size would "
                f"move every seed alike by {_sd(windows.text_error)}, which is in no interval"
            )
    return lines


def _ways(report: PowerReport) -> list[str]:
    effect = [] if report.effect is None else [f"seeds to find {report.effect:g}"]
    rows = [
        ["from", "a difference of", "pairs", "sd", "ratio", *effect, f"{_some(report.seeds, 'seed')} find"]
    ]
    for way in report.ways:
        needed = [] if report.effect is None else [_pairs(way.needed)]
        rows.append(
            [
                way.source,
                way.name,
                str(way.pairs) if way.pairs else "-",
                _sd(way.sd),
                "-" if math.isnan(way.ratio) else f"{way.ratio:.2f}",
                *needed,
                _sd(way.detectable),
            ]
        )
    return aligned(rows, left={0, 1})


def _sizes(report: PowerReport) -> list[str]:
    rows = [("seeds", "find", "FLOPs", "time here", "")]
    rows += [
        (
            f"{size.seeds:,}",
            _sd(size.detectable),
            f"{size.flops:.2e}",
            _hours(size.hours),
            ", ".join(size.reasons),
        )
        for size in report.sizes
    ]
    return aligned(rows, left={4})


def _costs(report: PowerReport) -> list[str]:
    costs = report.costs
    each = f"{costs.least:.2e}" + (f" to {costs.most:.2e}" if costs.most > costs.least else "")
    bound = (
        "; runs grow, so this is an upper bound: the largest model they may become"
        if costs.upper_bound
        else ""
    )
    lines = [
        f"cost     {_some(costs.runs, 'run')} of {each} FLOPs, {costs.total:.2e} in all{bound}",
        f"speed    {costs.rate:.2e} FLOP/s a run, {costs.rate_source}",
        f"time     {_hours(costs.hours)} with {_some(costs.at_a_time, 'run')} at a time, each as fast; without "
        "validation, diagnostics and checkpoints",
    ]
    if costs.budget is not None:
        on = f" on {costs.machine}" if costs.machine else ""
        fits = f"{_some(costs.fitting, 'seed')} would fit" if costs.fitting else "not one seed would fit"
        lines.append(f"budget   {costs.budget:g} h{on}: {costs.hours / costs.budget:.0%} of it; {fits}")
    return lines


def _sd(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _pairs(count: int | None) -> str:
    return f"more than {MOST_PAIRS:,}" if count is None else f"{count:,}"


def _hours(hours: float) -> str:
    return human_seconds(3600 * hours)


def _some(count: int | None, what: str) -> str:
    return f"{count or 0:,} {what}{'s' * (count != 1)}"
