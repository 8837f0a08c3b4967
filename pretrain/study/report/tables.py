"""The tables of a report, as a reader sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from model.heads import format_heads
from pretrain.study.results import RunResult
from pretrain.study.settings import label
from pretrain.study.statistics.paired import Estimate, fits_disagree
from pretrain.study.summaries import Contrasted, Sample, Summary, View, collect_values
from pretrain.utils.format import NOTHING, interval_text

EVALUATION = "evaluation/"
Row = dict[str, str]
"""Cells by their headings."""


@dataclass(frozen=True)
class Section:
    """A table. How it is to be read is in the page's template."""

    title: str
    rows: list[Row]

    @property
    def table(self) -> list[list[str]]:
        """Headings and cells; empty without rows. Columns that are empty in all rows are left out."""
        shown = [name for name in self.rows[0] if any(row[name] for row in self.rows)] if self.rows else []
        return [shown, *([row[name] for name in shown] for row in self.rows)] if self.rows else []


def sections(view: View) -> dict[str, Section]:
    """Every table of the report in the page's order, by the name that the template knows."""
    return {
        "effects": Section("Effects of levels", list(_effects(view))),
        "variance": Section("Analysis of variance", list(_variance(view))),
        "predictions": Section("Predicted", list(_predictions(view))),
        "results": Section("Results", list(map(_result, view.summaries))),
        "contrasts": Section("Contrasts", [_contrast(view, each) for each in view.contrasted]),
        "tuned": Section("Tuned with pilot seeds", list(_tuned(view))),
        "scores": Section("Zero-shot scores", list(_scores(view.listed))),
        "runs": Section("Runs", [row for each in view.summaries for row in _runs(view, each)]),
    }


def _effects(view: View) -> Iterator[Row]:
    for each in view.analysis.levels if view.analysis else ():
        yield {
            "factor": each.factor,
            "level": each.level,
            "runs": str(each.runs),
            "effect [95 % interval]": _estimate(each.least_squares),
            "Huber's, where it disagrees": _estimate(each.robust)
            if fits_disagree(each.least_squares, each.robust)
            else "",
        }


def _variance(view: View) -> Iterator[Row]:
    for row in view.analysis.variance if view.analysis else ():
        yield {
            "term": row["term"],
            "degrees": str(row["degrees"]),
            "share": f"{row['share']:.1%}",
            "F": _number(row["f"], ".2f"),
            "p": _number(row["p"]),
        }


def _predictions(view: View) -> Iterator[Row]:
    for each in view.analysis.predictions if view.analysis else ():
        yield {
            "schedule": each.name,
            "levels": ", ".join(each.levels),
            "predicted [95 % interval]": _estimate(each.estimate, ".4f"),
            "measured": _number(each.measured, ".4f"),
        }


def _result(summary: Summary) -> Row:
    differences = summary.differences
    return {
        "variant": summary.label,
        "heads": " or ".join(map(format_heads, summary.schedules)),
        "runs": f"{len(summary.values)} of {len(summary.runs)}",
        "mean ± sd": _spread(summary.values),
        "Δ [95 % interval]": _difference(differences),
        "pairs": str(len(differences)) if summary.definition.control else NOTHING,
        "parameters": _range(summary.parameters, ","),
        "training FLOPs": _range(summary.training_flops, ".3e"),
    }


def _contrast(view: View, found: Contrasted) -> Row:
    plain, robust = found.fits or (None, None)
    fitted = {
        "difference [95 % interval]": _estimate(plain),
        "Huber's, where it disagrees": _estimate(robust) if fits_disagree(plain, robust) else "",
        "p": _number(found.p),
    }
    seeds = f"{len(found.values)} of {len(view.study.file.seeds)}"
    return {
        "contrast": found.contrast.name + (" (other seeds)" if found.other_seeds else ""),
        "of": found.contrast.formula * (found.contrast.formula != found.contrast.name),
        **(fitted if view.effects else {"mean [95 % interval]": _difference(found.values)}),
        "adjusted p": _number(found.adjusted),
        **({} if view.effects else {"seeds": seeds}),
    }


def _tuned(view: View) -> Iterator[Row]:
    for name, each in view.study.tuned.items():
        yield {
            "variant": name,
            "setting": each.field,
            "values tried": str(len(each.tried)),
            "chosen": label(each.value) + " (an edge)" * each.at_edge,
            "mean of the pilots": ", ".join(f"{label(at)}: {_number(y, '.4f')}" for at, y in each.tried),
            "pilot seeds": ", ".join(map(str, each.seeds)),
        }


def _scores(summaries: Sequence[Summary]) -> Iterator[Row]:
    """A row for each zero-shot score and each variant that has it."""
    rows = [run.rows[-1] for summary in summaries for run in summary.finished]
    for key in sorted({key for row in rows for key in row if key.startswith(EVALUATION)}):
        for summary in summaries:
            score = partial(_last_value, key)
            if values := collect_values(summary.runs, score):
                yield {
                    "task/metric": key.removeprefix(EVALUATION),
                    "variant": summary.label,
                    "runs": str(len(values)),
                    "mean ± sd": _spread(values),
                    "Δ [95 % interval]": _difference(summary.differences_of(score)),
                }


def _last_value(key: str, run: RunResult) -> float | None:
    """Of a finished run's last step."""
    return run.rows[-1].get(key)


def _runs(view: View, summary: Summary) -> Iterator[Row]:
    for seed, run in summary.runs.items():
        yield {
            "run": run.planned.name,
            "variant": summary.variant,
            "seed": str(seed),
            "trained with": str(run.planned.run.seed),
            "state": run.state,
            "step": f"{run.step:,} of {run.planned.run.steps:,}",
            "result": _number(summary.values.get(seed), ".6f"),
            "Δ": _number(summary.differences.get(seed), "+.6f"),
            "outlier": "yes" if run.planned.name in view.outliers else "",
        }


def _number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return NOTHING
    return format(value, form) if math.isfinite(value) else "not finite"


def _estimate(found: Estimate | None, form: str = "+.4f") -> str:
    """An estimate with its interval."""
    return NOTHING if found is None else interval_text(found.value, found.low, found.high, form)


def _difference(values: Sample) -> str:
    """A mean difference with its interval."""
    return _estimate(values.interval) if values.interval else _number(values.mean, "+.4f")


def _spread(values: Sample) -> str:
    """Mean ± standard deviation."""
    return _number(values.mean, ".4f") + (f" ± {_number(values.sd, '.4f')}" if len(values) > 1 else "")


def _range(numbers: Sequence[float], form: str) -> str:
    """One number, or the first and the last."""
    texts = dict.fromkeys(format(number, form) for number in (*numbers[:1], *numbers[-1:]))
    return " to ".join(texts) or NOTHING
