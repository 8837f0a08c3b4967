"""What tests of the report share: views of planted runs, tables by row, and the figures that are drawn."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.study import summaries
from pretrain.study.report import panels
from pretrain.study.report.tables import sections
from tests.helpers.planted_runs import planned_study, planted_rows, result

SETTINGS = {"steps": 80, "global_batch_tokens": 512}


def small_study(folder=Path("runs/small"), **values):
    """A study of the recipe micro, of 80 steps of 512 tokens."""
    return planned_study(folder, **({"recipe": "micro", "seeds": 3, "settings": SETTINGS} | values))


def view_of(study, results):
    return summaries.view_of(study, list(results), Path(study.runs[0].run.runs_dir))


def planted(study, loss, more=lambda run: {}, without=(), **options):
    """Results of runs that end with *loss*, a function or losses by name; without one a run is missing.

    Args:
        more: figures of a run's last row.
        options: of the function result: data, world, failure; each may be a function of the run.
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
    return view_of(study, planted(study, loss, **options))


def section(found, title):
    return next(section for section in sections(found) if section.title == title)


def rows_of(found, title="Results", table=0):
    """The rows of a table as dictionaries, by their first cell; of equal first cells the first row."""
    frame = list(section(found, title).tables.values())[table]
    rows = {}
    for row in frame.to_dict("records"):
        rows.setdefault(row[frame.columns[0]], row)
    return rows


@contextmanager
def keeping_figures():
    """Yield a dict that gets every figure that is drawn, by its file."""
    made, original = {}, panels.saved_figure

    @contextmanager
    def kept(path, *arguments, **options):
        with original(path, *arguments, **options) as (figure, axes):
            made[path.name] = figure
            yield figure, axes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "saved_figure", kept)
        yield made


@pytest.fixture
def kept_figures():
    """Every figure that the test draws, by its file."""
    with keeping_figures() as made:
        yield made


def growing_view(variants, final, heads_at):
    """Two seeds of a uniform micro model and of more variants, with a row at every tenth of 80 steps.

    Args:
        final: the last validation loss of a run.
        heads_at: the heads of every layer at a step, for runs that grow; the model is that of the last row.
    """
    settings = SETTINGS | {"global_batch_tokens": 1024}
    variants = {"uniform": {"heads": "8x4"}, **variants}
    study = small_study(seeds=2, settings=settings, baseline="uniform", variants=variants)
    results = planted(study, final)
    for place, found in enumerate(results):
        run = found.planned
        if run.run.growth.active:
            for row in found.rows:
                heads = heads_at(run, row["step"])
                row |= {f"growth/heads/layer_{layer}": count for layer, count in enumerate(heads)}
            model = run.run.build_model_config(vocab_size=2048).replace(heads=heads)
            saved = dataclasses.replace(found.saved, model=model.to_json())
            results[place] = dataclasses.replace(found, saved=saved)
    return view_of(study, results)
