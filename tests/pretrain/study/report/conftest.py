"""What tests of the report share: views of planted runs, and tables by row."""

from __future__ import annotations

from pathlib import Path

from pretrain.study.report.tables import sections
from pretrain.study.summaries import build_view
from tests.helpers.planted_runs import planned_study, planted_rows, result

SETTINGS = {"steps": 80, "global_batch_tokens": 512}


def small_study(folder=Path("runs/small"), **values):
    """A study of the recipe micro, of 80 steps of 512 tokens."""
    return planned_study(folder, **({"recipe": "micro", "seeds": 3, "settings": SETTINGS} | values))


def planted(study, loss, more=lambda run: {}, without=(), **options):
    """Results of runs that end with *loss*, a function or losses by name; without one a run is missing.

    Args:
        more: figures of a run's last row.
        options: of the function result: model, data, world, failure; each may be a function of the run.
    """
    results = []
    for run in study.runs:
        final = loss(run) if callable(loss) else loss.get(run.name)
        rows = [] if final is None or run.name in without else planted_rows(run, final, **more(run))
        given = {key: value(run) if callable(value) else value for key, value in options.items()}
        results.append(result(run, rows, **given))
    return results


def view(study, loss, **options):
    """The view of planted results."""
    return build_view(study, planted(study, loss, **options))


def table_of(found, name):
    """The rows of a section's table as dictionaries."""
    headings, *rows = sections(found)[name].table or [[]]
    return [dict(zip(headings, row, strict=True)) for row in rows]


def rows_of(found, name="results"):
    """The same by their first cell."""
    return {next(iter(row.values())): row for row in table_of(found, name)}
