"""The tables of a report: data frames of text, each made from one description of its columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from model.heads import format_heads
from pretrain.study.report.figures import halves, scores, tokens_saved
from pretrain.study.statistics import mean_of
from pretrain.study.summaries import Contrasted, Sample, Summary, View

NOTHING = "—"
MOST_SCHEDULES = 3

Columns = dict[str, Callable[[Any], str]]
"""Names of columns, and what a row's cell says of the object that the row is of."""


@dataclass(frozen=True)
class Section:
    """Tables of one kind. How they are to be read is in the page's template."""

    title: str
    tables: dict[str, pd.DataFrame]
    """By what they are of: a comparison, whose name may be empty, or a measure."""
    left_out: list[str]
    """What there are no figures for, and why."""


def sections(view: View) -> list[Section]:
    """Every table of the report; sections without figures have none, but say why."""
    found = []
    for title, (columns, items, reason) in BY_COMPARISON.items():
        frames = {name: _frame(columns, items(view, of_one)) for name, of_one in view.summaries.items()}
        tables = {name: frame for name, frame in frames.items() if len(frame)}
        found.append(Section(title, tables, [] if tables or not reason else [reason]))
    return [found[0], _contrasts(view), *found[1:]]


def html(frame: pd.DataFrame) -> str:
    """The frame as an HTML table, escaped."""
    with pd.option_context("display.max_colwidth", None):
        return str(frame.to_html(index=False, border=0, justify="left"))


def _frame(columns: Columns, items: Iterable[Any]) -> pd.DataFrame:
    rows = [[text(item) for text in columns.values()] for item in items]
    return pd.DataFrame(rows, columns=list(columns))


def _difference(values: Sample) -> str:
    """A mean difference with its interval."""
    found = values.interval
    text = _number(values.mean, "+.4f")
    return f"{text} [{found.low:+.4f}, {found.high:+.4f}]" if found else text


def _excludes_zero(values: Sample) -> str:
    return NOTHING if not values.interval else "yes" if values.interval.excludes_zero else "no"


def _spread(values: Sample) -> str:
    """Mean ± standard deviation."""
    return _number(values.mean, ".4f") + (f" ± {_number(values.sd, '.4f')}" if len(values) > 1 else "")


def _number(value: float | None, form: str) -> str:
    if value is None:
        return NOTHING
    return format(value, form) if math.isfinite(value) else "not finite"


def _range(numbers: Sequence[float], form: str) -> str:
    """One number, or the first and the last."""
    texts = dict.fromkeys(format(number, form) for number in (*numbers[:1], *numbers[-1:]))
    return " to ".join(texts) or NOTHING


def _heads(summary: Summary) -> str:
    """The head schedule, or the first of several that grew, and when these heads were there."""
    texts = list(map(format_heads, summary.schedules))
    more = f" and {len(texts) - MOST_SCHEDULES} more" * (len(texts) > MOST_SCHEDULES)
    return " or ".join(texts[:MOST_SCHEDULES]) + more + summary.when


RESULTS: Columns = {
    "variant": lambda summary: summary.label,
    "heads": _heads,
    "runs": lambda summary: f"{len(summary.values)} of {len(summary.runs)}",
    "mean ± sd": lambda summary: _spread(summary.values),
    "Δ [95 % interval]": lambda summary: _difference(summary.differences),
    "excludes 0": lambda summary: _excludes_zero(summary.differences),
    "pairs": lambda summary: NOTHING if summary.is_baseline else str(len(summary.differences)),
    "detectable Δ": lambda summary: _number(summary.differences.detectable, ".4f"),
    "tokens/s": lambda summary: _number(summary.tokens_per_second, ",.0f"),
    "parameters": lambda summary: _range(summary.parameters, ","),
    "training FLOPs": lambda summary: _range(summary.training_flops, ".3e"),
}
CONTRASTS: Columns = {
    "contrast": lambda found: found.contrast.name + " (other seeds)" * found.other_seeds,
    "of": lambda found: found.contrast.formula,
    "mean [95 % interval]": lambda found: _difference(found.values),
    "excludes 0": lambda found: _excludes_zero(found.values),
    "detectable": lambda found: _number(found.values.detectable, ".4f"),
}


def _contrasts(view: View) -> Section:
    """The study's own contrasts, a table for each measure that they are in."""
    seeds: Columns = {"seeds": lambda found: f"{len(found.values)} of {len(view.study.file.seeds)}"}
    by_measure: dict[str, list[Contrasted]] = {}
    for found in view.contrasted:
        if found.values:
            by_measure.setdefault(view.described(found.measure), []).append(found)
    left_out = [
        f"{found.contrast.name}: {found.left_out or 'no seed of which all its runs are finished'}"
        for found in view.contrasted
        if not found.values
    ]
    tables = {measure: _frame(CONTRASTS | seeds, of) for measure, of in by_measure.items()}
    return Section("Contrasts", tables, left_out)


def _reached(saved: dict[int, float | None]) -> list[float]:
    return [share for share in saved.values() if share is not None]


TOKENS: Columns = {
    "variant": lambda row: row[0].label,
    "pairs that reach it": lambda row: f"{len(_reached(row[1]))} of {len(row[1])}",
    "mean": lambda row: NOTHING if None in row[1].values() else f"{mean_of(row[1].values()):.1%}",
    "by seed": lambda row: ", ".join(
        f"{seed}: {'not reached' if share is None else f'{share:.1%}'}" for seed, share in row[1].items()
    ),
}
SCORES: Columns = {
    "task/metric": lambda row: row.name,
    "variant": lambda row: row.summary.label,
    "runs": lambda row: str(len(row.values)),
    "mean ± sd": lambda row: _spread(row.values),
    "Δ [95 % interval]": lambda row: _difference(row.differences),
}
HALVES: Columns = {"figure": lambda row: row.name, "step": lambda row: f"{row.step:,}"} | {
    name: column for name, column in SCORES.items() if name != "task/metric"
}
RUNS: Columns = {
    "run": lambda row: row[1].planned.name,
    "variant": lambda row: row[1].planned.variant,
    "seed": lambda row: str(row[1].planned.seed),
    "trained with": lambda row: str(row[1].planned.run.seed),
    "state": lambda row: row[1].state,
    "step": lambda row: f"{row[1].step:,} of {row[1].planned.run.steps:,}",
    "result": lambda row: _number(row[0].values.get(row[1].planned.seed), ".6f"),
    "Δ": lambda row: _number(row[0].differences.get(row[1].planned.seed), "+.6f"),
}
BY_COMPARISON: dict[str, tuple[Columns, Callable[[View, list[Summary]], Iterable[Any]], str]] = {
    "Results": (RESULTS, lambda _, summaries: summaries, ""),
    "Tokens saved to reach the baseline's final loss": (
        TOKENS,
        lambda view, summaries: [(each, saved) for each in summaries if (saved := tokens_saved(view, each))],
        "no pair of finished runs has a validation loss",
    ),
    "Zero-shot scores": (SCORES, lambda _, summaries: scores(summaries), "no finished run has measured any"),
    "Diagnostics by half of the layers": (
        HALVES,
        lambda _, summaries: halves(summaries),
        "no finished run has measured any (diagnostics_every)",
    ),
    "Runs": (
        RUNS,
        lambda _, summaries: [(each, run) for each in summaries for run in each.runs.values()],
        "",
    ),
}
"""Sections with a table for each comparison: columns, what the rows are of, and why there may be none."""
