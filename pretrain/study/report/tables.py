"""The tables of a report as cells of plain text, which Markdown and HTML print alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from model.heads import format_heads
from pretrain.study.paired import values_of
from pretrain.study.report.contrasts import contrasted
from pretrain.study.report.schedule_features import FEATURES
from pretrain.study.report.summaries import (
    EVALUATION,
    OTHER_SEEDS,
    POWER,
    Summary,
    View,
    explanation,
    interval_of,
    score_keys,
    tokens_saved,
    what_became,
)
from pretrain.study.results import RunResult
from pretrain.study.statistics import Interval, mean_of, sd_of

NOTHING = "—"
MOST_SCHEDULES = 3


@dataclass(frozen=True)
class Table:
    """Cells of text, for Markdown and HTML."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)


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
    return [
        _results(view),
        _contrasts(view),
        _tokens(view),
        _explanations(view),
        _scores(view),
        _runs(view),
    ]


# ---------------------------------------------------------------------- results


def _results(view: View) -> Section:
    """Variants with mean ± sd, Δ by seed with its t-interval, and costs (the results table of arXiv 2606.27449)."""
    name, unit = view.words(view.measure)
    notes = [
        f"{name.capitalize()} in {unit}; {view.better} is better. Mean and standard deviation are over the finished "
        f"runs." + (f" A run's value is the mean of its last {view.last}." if view.last > 1 else ""),
        "Δ is the variant's value less its baseline's, seed by seed: their mean, with its 95 % t-interval over the "
        "pairs. The detectable Δ is the smallest true one that so many pairs find with a power of "
        f"{100 * POWER:.0f} %, from the standard deviation of these differences.",
        "Tokens/s are the median over the runs of the median over a run's later half. They depend on what else the "
        "machine did. Parameters are without padding; training FLOPs are FLOPs per token times "
        "tokens, of the model of the time.",
    ]
    if any(summary.when for of_one in view.summaries.values() for summary in of_one):
        notes.append(
            "At the end: of runs whose heads change, heads and parameters are those of the last step."
        )
    columns = (
        "variant", "heads", "runs", "mean ± sd", "Δ [95 % interval]", "pairs", "detectable Δ", "tokens/s",
        "parameters", "training FLOPs",
    )  # fmt: skip
    tables = []
    for comparison, summaries in view.summaries.items():
        gone = [what_became(run) for s in summaries for seed, run in s.runs.items() if seed not in s.values]
        own = [f"Not in this table: {'; '.join(gone)}."] if gone else []
        tables.append(Table(comparison, columns, [_result_row(summary) for summary in summaries], own))
    return Section("Results", notes, tables)


def _result_row(summary: Summary) -> tuple[str, ...]:
    rate, sd = summary.tokens_per_second, summary.sd
    mean = _number(summary.mean, ".4f")
    return (
        summary.label,
        _heads(summary),
        f"{len(summary.values)} of {len(summary.runs)}",
        mean if sd is None else f"{mean} ± {_number(sd, '.4f')}",
        interval_text(summary.interval) if summary.interval else _number(summary.mean_difference, "+.4f"),
        NOTHING if summary.is_baseline else str(len(summary.differences)),
        _number(summary.detectable, ".4f"),
        _number(rate, ",.0f"),
        _range([f"{number:,}" for number in summary.parameters]),
        _range([f"{number:.3e}" for number in summary.training_flops]),
    )


def _heads(summary: Summary) -> str:
    """The head schedule, or the first of several that grew, and when these heads were there."""
    texts = list(map(format_heads, summary.schedules))
    more = f" and {len(texts) - MOST_SCHEDULES} more" * (len(texts) > MOST_SCHEDULES)
    return " or ".join(texts[:MOST_SCHEDULES]) + more + summary.when


def interval_text(interval: Interval) -> str:
    """A mean difference with its interval."""
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return NOTHING
    return format(value, form) if math.isfinite(value) else "not finite"


def _known(value: float, form: str) -> str:
    return NOTHING if math.isnan(value) else format(value, form)


def _range(texts: Sequence[str]) -> str:
    """One text, or the first and the last."""
    if not texts:
        return NOTHING
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


# ---------------------------------------------------------------------- contrasts


def _contrasts(view: View) -> Section:
    """The study's own contrasts, a table for each measure that they are in."""
    every = contrasted(view)
    tables = []
    columns = ("contrast", "of", "mean [95 % interval]", "seeds", "detectable")
    for measure in dict.fromkeys(found.measure for found in every if found.values):
        rows = [
            (
                found.contrast.name + f", {OTHER_SEEDS}" * found.other_seeds,
                found.contrast.formula,
                interval_text(found.interval) if found.interval else _number(found.mean, "+.4f"),
                f"{len(found.values)} of {len(view.study.seeds)}",
                _number(found.detectable, ".4f"),
            )
            for found in every
            if found.measure == measure and found.values
        ]
        tables.append(Table(view.described(measure), columns, rows))
    notes = [
        f"The mean of some variants less the mean of others, for every seed of which all their runs are finished: the "
        f"mean of these values, with its 95 % t-interval. {view.better.capitalize()} is better, so a "
        f"{'positive' if view.better == 'higher' else 'negative'} value favours what is before the minus sign. A "
        "difference of two differences, with two variants on each side, is half of it. The detectable value is the "
        f"smallest true one that so many seeds find with a power of {100 * POWER:.0f} %."
    ]
    left_out = [
        f"{found.contrast.name}: {found.left_out or 'no seed of which all its runs are finished'}"
        for found in every
        if not found.values
    ]
    return Section("Contrasts", notes, tables, left_out)


# ---------------------------------------------------------------------- tokens to the control's loss


def _tokens(view: View) -> Section:
    tables = []
    for comparison, summaries in view.summaries.items():
        rows = []
        for summary in summaries:
            saved = tokens_saved(view, summary)
            if not saved:
                continue
            reached = [share for share in saved.values() if share is not None]
            each = (
                f"{seed}: {'not reached' if share is None else f'{share:.1%}'}"
                for seed, share in saved.items()
            )
            mean = f"{fmean(reached):.1%}" if len(reached) == len(saved) else NOTHING
            rows.append((summary.label, f"{len(reached)} of {len(saved)}", mean, ", ".join(each)))
        if rows:
            columns = ("variant", "pairs that reach it", "mean", "by seed")
            tables.append(Table(comparison, columns, rows))
    notes = [
        "The share of the baseline's tokens that the variant of the same seed does not need; negative where it needs "
        "more. There is a mean only if every pair reaches the loss.",
        f"By {view.described(view.loss)}. Between two validations it is taken to be a straight line. The learning rate "
        "follows the run's whole length, so a shorter run would have ended otherwise.",
    ]
    left_out = [] if tables else ["no pair of finished runs has a validation loss"]
    return Section("Tokens saved to reach the baseline's final loss", notes, tables, left_out)


# ---------------------------------------------------------------------- what explains the differences


def _explanations(view: View) -> Section:
    tables = []
    reasons: dict[str, list[str]] = {}
    for comparison in view.summaries:
        found, left_out = explanation(view, comparison)
        regression = found.regression
        if regression is None:
            reasons.setdefault(found.reason, []).append(comparison)
            continue
        notes = [f"Left out: {'; '.join(left_out)}."] if left_out else []
        rows = [
            (name, *(f"{values[feature]:.3f}" for feature in FEATURES), f"{found.outcome[name]:+.4f}")
            for name, values in found.features.items()
        ]
        baseline = view.summaries[comparison][0].comparison.baseline
        tables.append(Table(comparison, ("variant", *FEATURES, f"mean Δ from {baseline}"), rows, notes))
        rows = [
            (
                each.name,
                _known(each.raw, "+.5f"),
                NOTHING if math.isnan(each.raw_low) else f"[{each.raw_low:+.5f}, {each.raw_high:+.5f}]",
                _known(each.standardised, "+.2f"),
                _known(each.correlation, "+.2f"),
                f"{each.inflation:.3g}",
            )
            for each in regression.coefficients
        ]
        columns = (
            "feature", "Δ per unit", "95 % interval", "standardised", "correlation with Δ", "variance inflation",
        )  # fmt: skip
        notes = [f"R² {_known(regression.r_squared, '.2f')}, {regression.points} schedules."]
        notes += [f"Warning: {warning}." for warning in regression.warnings]
        tables.append(
            Table(f"{comparison}: regression" if comparison else "regression", columns, rows, notes)
        )
    notes = [
        "Which property of a schedule goes with its mean Δ, by least squares over the variants of a comparison that "
        "differ in their heads only, the baseline (Δ 0) among them. Each counts alike, however wide its interval is. "
        + "; ".join(f"{name}: {text}" for name, text in FEATURES.items())
        + ".",
    ]
    missing = [
        reason + f" ({', '.join(names)})" * (len(view.summaries) > 1) for reason, names in reasons.items()
    ]
    return Section("What explains the differences", notes, tables, missing)


# ---------------------------------------------------------------------- zero-shot scores, and single runs


def _scores(view: View) -> Section:
    tables = []
    for comparison, summaries in view.summaries.items():
        rows = []
        for key in score_keys(summaries):
            for summary in summaries:
                values = values_of(summary.runs, key, 1)
                if not values:
                    continue
                sd = f" ± {sd_of(values.values()):.4f}" if len(values) > 1 else ""
                paired = view.difference_of(summary, key)
                interval = interval_of(paired.values())
                rows.append(
                    (
                        key.removeprefix(EVALUATION),
                        summary.label,
                        str(len(values)),
                        f"{mean_of(values.values()):.4f}{sd}",
                        interval_text(interval) if interval else NOTHING,
                    )
                )
        if rows:
            columns = ("task/metric", "variant", "runs", "mean ± sd", "Δ [95 % interval]")
            tables.append(Table(comparison, columns, rows))
    notes = [
        "Scores of lm-eval at the end of finished runs, as it defines the metrics: accuracies are shares (higher is "
        "better), perplexities and bits per byte are better when lower. Only what was measured is listed."
    ]
    left_out = [] if tables else ["no finished run has measured any"]
    return Section("Zero-shot scores", notes, tables, left_out)


def _runs(view: View) -> Section:
    columns = ("run", "variant", "seed", "trained with", "state", "step", view.measure, "Δ")
    tables = []
    for comparison, summaries in view.summaries.items():
        rows = [_run_row(summary, run) for summary in summaries for run in summary.runs.values()]
        tables.append(Table(comparison, columns, rows))
    notes = [
        "Every run of the study, so that all of the above can be computed again. Seed is the study's, which pairs "
        "runs; trained with is the run's own. Runs without a value are in no mean and no difference."
    ]
    return Section("Runs", notes, tables)


def _run_row(summary: Summary, run: RunResult) -> tuple[str, ...]:
    return (
        run.planned.name,
        run.variant,
        str(run.seed),
        str(run.planned.run.seed),
        run.state,
        f"{run.step:,} of {run.steps:,}",
        _number(summary.values.get(run.seed), ".6f"),
        _number(summary.differences.get(run.seed), "+.6f"),
    )
