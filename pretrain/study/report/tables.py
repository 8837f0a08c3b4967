"""The tables of a report: their rows, as results.json holds them, and the columns that a reader sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

from model.declared import to_dict
from model.heads import format_heads
from pretrain.study.settings import label
from pretrain.study.summaries import Contrasted, Sample, Summary, View, collect_values
from pretrain.utils.format import NOTHING, interval_text

EVALUATION = "evaluation/"
Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]
"""Headings, and what a row says under them."""


@dataclass(frozen=True)
class Section:
    """A table. How it is to be read is in the page's template."""

    title: str
    columns: Columns
    rows: list[Row]

    @property
    def table(self) -> list[list[str]]:
        """Headings and cells; empty without rows. Columns that are empty in all rows are left out."""
        cells = {name: [text(row) for row in self.rows] for name, text in self.columns.items()}
        shown = {name: column for name, column in cells.items() if any(column)}
        return [[*shown], *map(list, zip(*shown.values(), strict=True))] if self.rows else []


def sections(view: View) -> dict[str, Section]:
    """Every table of the report in the page's order, by its name in results.json."""
    effects = view.analysis
    levels = effects.levels if effects else []
    contrasts = FITTED if view.effects else CONTRASTS
    return {
        "effects": Section(
            "Effects of levels", EFFECTS, [asdict(each) | {"disagree": each.fits_disagree} for each in levels]
        ),
        "variance": Section("Analysis of variance", VARIANCE, effects.variance if effects else []),
        "predictions": Section(
            "Predicted", PREDICTIONS, [asdict(each) for each in effects.predictions] if effects else []
        ),
        "results": Section("Results", RESULTS, list(map(_result, view.summaries))),
        "contrasts": Section("Contrasts", contrasts, [_contrast(view, each) for each in view.contrasted]),
        "tuned": Section(
            "Tuned with pilot seeds",
            TUNED,
            [{"variant": name} | to_dict(each) for name, each in view.study.tuned.items()],
        ),
        "scores": Section("Zero-shot scores", SCORES, list(_scores(view.listed))),
        "runs": Section("Runs", RUNS, [row for each in view.summaries for row in _runs(view, each)]),
    }


def _result(summary: Summary) -> Row:
    names = ("variant", "label", "schedules", "values", "differences", "parameters", "training_flops")
    found = {name: getattr(summary, name) for name in names}
    return found | {"baseline": summary.definition.control, "runs": len(summary.runs)}


def _contrast(view: View, found: Contrasted) -> Row:
    plain, robust = found.fits or (None, None)
    own = asdict(found.contrast)
    del own["order"]
    return own | {
        "name": found.contrast.name + (" (other seeds)" if found.other_seeds else ""),
        "values": found.values,
        "estimate": asdict(plain) if plain else None,
        "robust": asdict(robust) if robust else None,
        "p": found.p,
        "adjusted": found.adjusted,
        "seeds": len(view.study.file.seeds),
    }


def _scores(summaries: Sequence[Summary]) -> Iterator[Row]:
    """A row for each zero-shot score and each variant that has it."""
    rows = [row for summary in summaries for run in summary.finished for row in run.rows]
    for key in sorted({key for row in rows for key in row if key.startswith(EVALUATION)}):
        for summary in summaries:
            score = methodcaller("result", key)
            if values := collect_values(summary.runs, score):
                own = {"task": key.removeprefix(EVALUATION), "variant": summary.label, "values": values}
                yield own | {"differences": summary.differences_of(score)}


def _runs(view: View, summary: Summary) -> list[Row]:
    return [
        {
            "name": run.planned.name,
            "variant": summary.variant,
            "seed": seed,
            "trained_with": run.planned.run.seed,
            "state": run.state,
            "step": run.step,
            "steps": run.planned.run.steps,
            "result": summary.values.get(seed),
            "difference": summary.differences.get(seed),
            "outlier": run.planned.name in view.outliers,
            "heads": run.model_config and run.model_config.heads,
            "code": run.world and run.world.code,
        }
        for seed, run in summary.runs.items()
    ]


def _number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return NOTHING
    return format(value, form) if math.isfinite(value) else "not finite"


def _estimate(found: Row | None, form: str = "+.4f") -> str:
    """An estimate of the linear model with its interval."""
    return NOTHING if found is None else interval_text(found["value"], found["low"], found["high"], form)


def _difference(values: Sample) -> str:
    """A mean difference with its interval."""
    found = values.interval
    return interval_text(found.mean, found.low, found.high) if found else _number(values.mean, "+.4f")


def _hodges_lehmann(values: Sample) -> str:
    """The Hodges-Lehmann estimate with its interval and the interval's level."""
    found = values.ranks
    return f"{interval_text(found.estimate, found.low, found.high)} {found.level:.1%}" if found else NOTHING


def _rank_p(values: Sample) -> str:
    return _number(values.ranks.p if values.ranks else None)


def _spread(values: Sample) -> str:
    """Mean ± standard deviation."""
    return _number(values.mean, ".4f") + (f" ± {_number(values.sd, '.4f')}" if len(values) > 1 else "")


def _range(numbers: Sequence[float], form: str) -> str:
    """One number, or the first and the last."""
    texts = dict.fromkeys(format(number, form) for number in (*numbers[:1], *numbers[-1:]))
    return " to ".join(texts) or NOTHING


EFFECTS: Columns = {
    "factor": lambda row: row["factor"],
    "level": lambda row: row["level"],
    "runs": lambda row: str(row["runs"]),
    "effect [95 % interval]": lambda row: _estimate(row["least_squares"]),
    "Huber's, where it disagrees": lambda row: _estimate(row["robust"]) if row["disagree"] else "",
    "outliers": lambda row: str(row["outliers"]),
}
VARIANCE: Columns = {
    "term": lambda row: row["term"],
    "degrees": lambda row: str(row["degrees"]),
    "share": lambda row: f"{row['share']:.1%}",
    "F": lambda row: _number(row["f"], ".2f"),
    "p": lambda row: _number(row["p"]),
}
PREDICTIONS: Columns = {
    "schedule": lambda row: row["name"],
    "levels": lambda row: ", ".join(row["levels"]),
    "predicted [95 % interval]": lambda row: _estimate(row["estimate"], ".4f"),
    "measured": lambda row: _number(row["measured"], ".4f"),
}
RESULTS: Columns = {
    "variant": lambda row: row["label"],
    "heads": lambda row: " or ".join(map(format_heads, row["schedules"])),
    "runs": lambda row: f"{len(row['values'])} of {row['runs']}",
    "mean ± sd": lambda row: _spread(row["values"]),
    "Δ [95 % interval]": lambda row: _difference(row["differences"]),
    "Hodges–Lehmann Δ [exact interval, its level]": lambda row: _hodges_lehmann(row["differences"]),
    "signed-rank p": lambda row: _rank_p(row["differences"]),
    "pairs": lambda row: str(len(row["differences"])) if row["baseline"] else NOTHING,
    "detectable Δ": lambda row: _number(row["differences"].detectable, ".4f"),
    "parameters": lambda row: _range(row["parameters"], ","),
    "training FLOPs": lambda row: _range(row["training_flops"], ".3e"),
}
CONTRASTS: Columns = {
    "contrast": lambda row: row["name"],
    "of": lambda row: row["formula"],
    "mean [95 % interval]": lambda row: _difference(row["values"]),
    "Hodges–Lehmann [exact interval, its level]": lambda row: _hodges_lehmann(row["values"]),
    "signed-rank p": lambda row: _rank_p(row["values"]),
    "adjusted p": lambda row: _number(row["adjusted"]),
    "detectable": lambda row: _number(row["values"].detectable, ".4f"),
    "seeds": lambda row: f"{len(row['values'])} of {row['seeds']}",
}
FITTED: Columns = {
    "contrast": lambda row: row["name"],
    "of": lambda row: row["formula"],
    "difference [95 % interval]": lambda row: _estimate(row["estimate"]),
    "Huber's [95 % interval]": lambda row: _estimate(row["robust"]),
    "p": lambda row: _number(row["p"]),
    "adjusted p": lambda row: _number(row["adjusted"]),
}
"""Of contrasts in a study without a baseline."""
TUNED: Columns = {
    "variant": lambda row: row["variant"],
    "setting": lambda row: row["field"],
    "values tried": lambda row: str(len(row["tried"])),
    "chosen": lambda row: label(row["value"]) + " (an edge)" * row["at_edge"],
    "mean of the pilots": lambda row: ", ".join(
        f"{label(at)}: {_number(y, '.4f')}" for at, y in row["tried"]
    ),
    "pilot seeds": lambda row: ", ".join(map(str, row["seeds"])),
}
SCORES: Columns = {
    "task/metric": lambda row: row["task"],
    "variant": lambda row: row["variant"],
    "runs": lambda row: str(len(row["values"])),
    "mean ± sd": lambda row: _spread(row["values"]),
    "Δ [95 % interval]": lambda row: _difference(row["differences"]),
}
RUNS: Columns = {
    "run": lambda row: row["name"],
    "variant": lambda row: row["variant"],
    "seed": lambda row: str(row["seed"]),
    "trained with": lambda row: str(row["trained_with"]),
    "state": lambda row: row["state"],
    "step": lambda row: f"{row['step']:,} of {row['steps']:,}",
    "result": lambda row: _number(row["result"], ".6f"),
    "Δ": lambda row: _number(row["difference"], "+.6f"),
    "outlier": lambda row: "yes" if row["outlier"] else "",
}
