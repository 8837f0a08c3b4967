"""All numbers of a report, as results.json holds them."""

from __future__ import annotations

from typing import Any

from pretrain.study.contrasts import full_name
from pretrain.study.report.figures import (
    Measured,
    distance_differences,
    gap_over_tokens,
    halves,
    score_keys,
    tokens_saved,
)
from pretrain.study.results import RunResult, unnamed_runs
from pretrain.study.summaries import CONFIDENCE, Contrasted, Summary, View, values_of


def numbers(view: View) -> dict[str, Any]:
    """All numbers of the report, under names; what is not known is None."""
    return {
        "study": view.study.name,
        "title": view.study.title,
        "measure": view.measure,
        "better": view.better,
        "last_validations": view.last,
        "confidence": CONFIDENCE,
        "notes": view.caveats,
        "unnamed_runs": unnamed_runs(view.study, view.folder),
        "runs": [_run(view, run) for run in view.results],
        "comparisons": [
            {
                "name": name,
                "baseline": summaries[0].comparison.baseline,
                "variants": [_variant(view, summary) for summary in summaries],
                "diagnostics": [_measured(found) for found in halves(summaries)],
            }
            for name, summaries in view.summaries.items()
        ],
        "contrasts": [_contrast(found) for found in view.contrasted],
    }


def _run(view: View, run: RunResult) -> dict[str, Any]:
    return {
        "name": run.planned.name,
        "comparison": run.planned.comparison,
        "variant": run.planned.variant,
        "seed": run.planned.seed,
        "trained_with": run.planned.run.seed,
        "state": run.state,
        "step": run.step,
        "steps": run.planned.run.steps,
        "result": run.result(view.measure, view.last),
        "heads": list(run.model_config.heads) if run.model_config else None,
        "code": run.world.code if run.world else None,
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
        "attention_distance_differences": distance_differences(summary),
        "scores": {key: values_of(summary.runs, key) for key in keys},
        "score_differences": {key: summary.differences_of(key) for key in keys},
    }


def _measured(found: Measured) -> dict[str, Any]:
    return {
        "name": found.name,
        "step": found.step,
        "variant": found.summary.variant,
        "values": found.values,
        "differences": found.differences,
    }


def _contrast(found: Contrasted) -> dict[str, Any]:
    return {
        "name": found.contrast.name,
        "plus": [full_name(variant) for variant in found.contrast.plus],
        "minus": [full_name(variant) for variant in found.contrast.minus],
        "measure": found.measure,
        "values": found.values,
        "mean": found.values.mean,
        **found.values.numbers(),
        "other_seeds": found.other_seeds,
        "notes": found.notes,
        "left_out": found.left_out or None,
    }
