"""All numbers of a report, as results.json holds them."""

from __future__ import annotations

from typing import Any

from pretrain.study.report.contrasts import contrast_notes, contrasted
from pretrain.study.report.figures import (
    Measured,
    distance_differences,
    gap_over_tokens,
    halves,
    score_keys,
    tokens_saved,
)
from pretrain.study.report.summaries import CONFIDENCE, Summary, View
from pretrain.study.results import RunResult


def numbers(view: View) -> dict[str, Any]:
    """All numbers of the report, under names; what is not known is None."""
    return {
        "study": view.study.name,
        "title": view.study.title,
        "measure": view.measure,
        "better": view.better,
        "last_validations": view.last,
        "confidence": CONFIDENCE,
        "notes": [*view.comparability.notes, *contrast_notes(view)],
        "unnamed_runs": list(view.unnamed),
        "runs": [_run(view, run) for run in view.results],
        "comparisons": [
            {
                "name": name,
                "baseline": summaries[0].comparison.baseline,
                "variants": [_variant(view, summary) for summary in summaries],
                "diagnostics": [_measured(found) for found in halves(view, summaries)],
            }
            for name, summaries in view.summaries.items()
        ],
        "contrasts": [found.numbers() for found in contrasted(view)],
    }


def _run(view: View, run: RunResult) -> dict[str, Any]:
    return {
        "name": run.planned.name,
        "comparison": run.comparison,
        "variant": run.variant,
        "seed": run.seed,
        "trained_with": run.planned.run.seed,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "result": run.result(view.measure, view.last),
        "heads": list(run.model_config.heads) if run.model_config else None,
        "code": run.world.get("code"),
    }


def _variant(view: View, summary: Summary) -> dict[str, Any]:
    keys = score_keys([summary])
    return {
        "name": summary.variant,
        "baseline": None if summary.is_baseline else summary.baseline,
        "other_seeds": summary.other_seeds,
        "schedules": [list(schedule) for schedule in summary.schedules],
        "values": summary.values,
        "mean": summary.values.mean,
        "sd": summary.values.sd,
        "differences": summary.differences,
        "mean_difference": summary.differences.mean,
        **summary.differences.numbers(),
        "tokens_per_second": summary.tokens_per_second,
        "parameters": summary.parameters,
        "training_flops": summary.training_flops,
        "tokens_saved": tokens_saved(view, summary),
        "gap_over_tokens": gap_over_tokens(view, summary),
        "attention_distance_differences": distance_differences(view, summary),
        "scores": {
            key: {seed: run.result(key) for seed, run in summary.runs.items() if run.result(key) is not None}
            for key in keys
        },
        "score_differences": {key: view.difference_of(summary, key) for key in keys},
    }


def _measured(found: Measured) -> dict[str, Any]:
    return {
        "name": found.name,
        "step": found.step,
        "variant": found.summary.variant,
        "values": found.values,
        "differences": found.differences,
    }
