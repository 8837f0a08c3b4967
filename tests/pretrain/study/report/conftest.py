"""What tests of pictures share: the figures themselves, and planted runs whose heads grow."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.study.comparable import check_comparable
from pretrain.study.report import compared, measured, panels
from pretrain.study.report.summaries import View
from tests.helpers.planted_runs import planned_study, planted_rows, result


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
        for module in (compared, measured, panels):
            patch.setattr(module, "saved_figure", kept)
        yield made


@pytest.fixture
def kept_figures():
    """Every figure that the test draws, by its file."""
    with keeping_figures() as made:
        yield made


@pytest.fixture
def growing_view():
    """Two seeds of a uniform micro model and of more variants, 80 steps with a row at every tenth.

    The test gives the variants, of each run the last validation loss, and for those that grow the heads of every
    layer at each step; the model at their end is that of the last row.
    """

    def view(variants, final, heads_at):
        study = planned_study(
            Path("runs/growing"),
            recipe="micro",
            seeds=2,
            settings={"steps": 80, "global_batch_tokens": 1024},
            baseline="uniform",
            variants={"uniform": {"heads": "8x4"}, **variants},
        )
        results = []
        for run in study.runs:
            rows, model = planted_rows(run, final(run)), None
            if run.run.growth.active:
                for row in rows:
                    heads = heads_at(run, row["step"])
                    row |= {f"growth/heads/layer_{layer}": count for layer, count in enumerate(heads)}
                model = run.run.build_model_config(vocab_size=2048).replace(heads=heads)
            results.append(result(run, rows, model=model))
        return View(study, results, check_comparable(study, results))

    return view
