"""The tables of a report: data frames of text, each made from one description of its columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from model.heads import format_heads
from pretrain.study.report.contrasts import contrasted
from pretrain.study.report.figures import halves, scores, tokens_saved
from pretrain.study.report.summaries import OTHER_SEEDS, POWER, Sample, Summary, View
from pretrain.study.statistics import Interval, mean_of

NOTHING = "—"
MOST_SCHEDULES = 3

Columns = Mapping[str, Callable[[Any], str]]
"""Names of columns, and what a row's cell says of the object that the row is of."""


@dataclass(frozen=True)
class Table:
    """A data frame of text, with its title and notes."""

    title: str
    frame: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    def html(self) -> str:
        """The frame as an HTML table, escaped."""
        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html(index=False, border=0, justify="left"))


@dataclass(frozen=True)
class Section:
    """Tables of one kind, and how all of them are to be read."""

    title: str
    notes: list[str]
    tables: list[Table]
    left_out: list[str] = field(default_factory=list)
    """What there are no figures for, and why."""


def sections(view: View) -> list[Section]:
    """Every table of the report; sections without figures have none, but say why."""
    return [_results(view), _contrasts(view), _tokens(view), _scores(view), _halves(view), _runs(view)]


def _frame(columns: Columns, items: Iterable[Any]) -> pd.DataFrame:
    rows = [[text(item) for text in columns.values()] for item in items]
    return pd.DataFrame(rows, columns=list(columns))


def _tables(view: View, columns: Columns, items: Callable[[list[Summary]], Iterable[Any]]) -> list[Table]:
    """A table for each comparison that has *items*."""
    frames = {name: _frame(columns, items(summaries)) for name, summaries in view.summaries.items()}
    return [Table(name, frame) for name, frame in frames.items() if len(frame)]


# ---------------------------------------------------------------------- cells


def interval_text(interval: Interval) -> str:
    """A mean difference with its interval."""
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _difference(values: Sample) -> str:
    return interval_text(values.interval) if values.interval else _number(values.mean, "+.4f")


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


# ---------------------------------------------------------------------- results and contrasts

RESULTS: Columns = {
    "variant": lambda summary: summary.label,
    "heads": _heads,
    "runs": lambda summary: f"{len(summary.values)} of {len(summary.runs)}",
    "mean ± sd": lambda summary: _spread(summary.values),
    "Δ [95 % interval]": lambda summary: _difference(summary.differences),
    "pairs": lambda summary: NOTHING if summary.is_baseline else str(len(summary.differences)),
    "detectable Δ": lambda summary: _number(summary.differences.detectable, ".4f"),
    "tokens/s": lambda summary: _number(summary.tokens_per_second, ",.0f"),
    "parameters": lambda summary: _range(summary.parameters, ","),
    "training FLOPs": lambda summary: _range(summary.training_flops, ".3e"),
}
CONTRASTS: Columns = {
    "contrast": lambda found: found.contrast.name + f", {OTHER_SEEDS}" * found.other_seeds,
    "of": lambda found: found.contrast.formula,
    "mean [95 % interval]": lambda found: _difference(found.values),
    "seeds": lambda found: f"{len(found.values)} of {found.seeds}",
    "detectable": lambda found: _number(found.values.detectable, ".4f"),
}


def _results(view: View) -> Section:
    """Variants with mean ± sd, Δ by seed with its t-interval, and costs (the results table of arXiv 2606.27449)."""
    name, unit = view.words(view.measure)
    last = f" A run's value is the mean of its last {view.last}." if view.last > 1 else ""
    notes = [
        f"{name.capitalize()} in {unit}; {view.better} is better. Mean and standard deviation are over the "
        f"finished runs.{last}",
        "Δ is the variant's value less its baseline's, seed by seed: their mean, with its 95 % t-interval over "
        "the pairs. The detectable Δ is the smallest true one that so many pairs find with a power of "
        f"{100 * POWER:.0f} %, from the standard deviation of these differences.",
        "Tokens/s are the median over the runs of the median over a run's later half. They depend on what else "
        "the machine did. Parameters are without padding; training FLOPs are FLOPs per token times tokens, of "
        "the model of the time.",
    ]
    if any(summary.when for summary in view.every):
        notes.append(
            "At the end: of runs whose heads change, heads and parameters are those of the last step."
        )
    tables = _tables(view, RESULTS, lambda summaries: summaries)
    for table in tables:
        gone = view.without_result(view.summaries[table.title])
        table.notes.extend([f"Not in this table: {'; '.join(gone)}."] if gone else [])
    return Section("Results", notes, tables)


def _contrasts(view: View) -> Section:
    """The study's own contrasts, a table for each measure that they are in."""
    every = contrasted(view)
    shown = [found for found in every if found.values]
    tables = [
        Table(
            view.described(measure), _frame(CONTRASTS, [found for found in shown if found.measure == measure])
        )
        for measure in dict.fromkeys(found.measure for found in shown)
    ]
    notes = [
        "The mean of some variants less the mean of others, for every seed of which all their runs are finished: "
        f"the mean of these values, with its 95 % t-interval. {view.better.capitalize()} is better, so a "
        f"{'positive' if view.better == 'higher' else 'negative'} value favours what is before the minus sign. "
        "A difference of two differences, with two variants on each side, is half of it. The detectable value is "
        f"the smallest true one that so many seeds find with a power of {100 * POWER:.0f} %."
    ]
    left_out = [
        f"{found.contrast.name}: {found.left_out or 'no seed of which all its runs are finished'}"
        for found in every
        if not found.values
    ]
    return Section("Contrasts", notes, tables, left_out)


# ---------------------------------------------------------------------- tokens to the control's loss


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


def _tokens(view: View) -> Section:
    def rows(summaries: list[Summary]) -> list[Any]:
        return [(summary, saved) for summary in summaries if (saved := tokens_saved(view, summary))]

    tables = _tables(view, TOKENS, rows)
    notes = [
        "The share of the baseline's tokens that the variant of the same seed does not need; negative where it "
        "needs more. There is a mean only if every pair reaches the loss.",
        f"By {view.described(view.loss)}. Between two validations it is taken to be a straight line. The learning "
        "rate follows the run's whole length, so a shorter run would have ended otherwise.",
    ]
    left_out = [] if tables else ["no pair of finished runs has a validation loss"]
    return Section("Tokens saved to reach the baseline's final loss", notes, tables, left_out)


# ---------------------------------------------------------------------- what else was measured

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


def _scores(view: View) -> Section:
    tables = _tables(view, SCORES, partial(scores, view))
    notes = [
        "Scores of lm-eval at the end of finished runs, as it defines the metrics: accuracies are shares (higher "
        "is better), perplexities and bits per byte are better when lower. Only what was measured is listed."
    ]
    return Section("Zero-shot scores", notes, tables, [] if tables else ["no finished run has measured any"])


def _halves(view: View) -> Section:
    """Diagnostics of the lower and the upper half of the layers, early and late (arXiv 2605.10504 slows the upper)."""
    tables = _tables(view, HALVES, partial(halves, view))
    notes = [
        "Means over the lower half of the layers and over the upper one (l of L with 2 l ≥ L), of finished runs, "
        "at the first step at which a figure was measured and at the last; Δ less the baseline's, seed by seed. "
        "docs/diagnostics.md says what the figures are."
    ]
    left_out = [] if tables else ["no finished run has measured any (diagnostics_every)"]
    return Section("Diagnostics by half of the layers", notes, tables, left_out)


RUN_COLUMNS: Columns = {
    "run": lambda row: row[1].planned.name,
    "variant": lambda row: row[1].variant,
    "seed": lambda row: str(row[1].seed),
    "trained with": lambda row: str(row[1].planned.run.seed),
    "state": lambda row: row[1].state,
    "step": lambda row: f"{row[1].step:,} of {row[1].steps:,}",
    "result": lambda row: _number(row[0].values.get(row[1].seed), ".6f"),
    "Δ": lambda row: _number(row[0].differences.get(row[1].seed), "+.6f"),
}


def _runs(view: View) -> Section:
    def rows(summaries: list[Summary]) -> list[Any]:
        return [(summary, run) for summary in summaries for run in summary.runs.values()]

    notes = [
        "Every run of the study, so that all of the above can be computed again. Seed is the study's, which pairs "
        f"runs; trained with is the run's own. The result is {view.measure}. Runs without a value are in no mean "
        "and no difference."
    ]
    return Section("Runs", notes, _tables(view, RUN_COLUMNS, rows))
