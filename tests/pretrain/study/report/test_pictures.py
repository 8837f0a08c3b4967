"""Pictures of a report: what they show, and which are left out."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from model.errors import UserError
from pretrain.study.report import pictures
from pretrain.study.report.pictures import draw_all
from pretrain.study.summaries import build_view
from pretrain.study.tuning import Tuned, write_tuned
from tests.helpers.planted_runs import result
from tests.pretrain.study.report.conftest import planted, small_study, view

SCHEDULES = {"uniform": "8x4", "rising": "2,4,8,8", "falling": "8,8,4,2", "narrow": "4x4"}
EFFECTS = {"uniform": 0.0, "rising": -0.02, "falling": 0.01, "narrow": 0.005, "again": 0.0}
GROWTH = {"criterion": "incrt", "start": 1, "maximum": 8}
LAYERS = 4


@contextmanager
def keeping_figures():
    """Yield a dict that gets every figure that is drawn, by its file's stem."""
    made, original = {}, pictures.save_figure

    @contextmanager
    def kept(path, *arguments, **options):
        with original(path, *arguments, **options) as (figure, axes):
            made[path.stem] = figure
            yield figure, axes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "save_figure", kept)
        yield made


def full_view():
    """Two sizes of four schedules and a check of equal runs; one run is missing."""
    variants = {name: {"heads": heads} for name, heads in SCHEDULES.items()}
    sizes = {"size": {"small": {}, "large": {"architecture": {"d_model": 256}}}}
    variants["again"] = {"heads": "8x4", "seed_shift": 1000}

    def losses(run):
        wobble = 0.003 * ((7 * run.seed + len(run.definition.levels[1])) % 5)
        return 3.5 + EFFECTS[run.definition.levels[1]] + 0.02 * run.seed + wobble

    study = small_study(effect=0.02, baseline="uniform", variants=variants, vary=sizes)
    return view(study, losses, without=("small-rising-s3",))


def grown_view():
    """Two seeds of a uniform model, and of one with a head in every layer, two from step 20 on, and four from
    step 40 (seed 1) or 60 (seed 2) on."""
    variants = {"uniform": {"heads": "8x4"}, "grown": {"growth": GROWTH}}
    settings = {"steps": 80, "global_batch_tokens": 1024}
    study = small_study(seeds=2, settings=settings, baseline="uniform", variants=variants)
    four = study.runs[1].run.build_model_config(vocab_size=2048).replace(heads=(4,) * LAYERS)
    final = {run.name: 3.5 + 0.01 * run.seed for run in study.runs}
    results = planted(study, final, model=lambda run: four if run.run.growth.active else None)
    for found in results[1::2]:
        late = 40 if found.planned.seed == 1 else 60
        for row in found.rows:
            heads = 1 + (row["step"] >= 20) + 2 * (row["step"] >= late)
            row |= {f"growth/heads/layer_{layer}": heads for layer in range(LAYERS)}
    return build_view(study, results)


def places(line):
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_the_forest_shows_every_pair_and_the_interval(tmp_path):
    with keeping_figures() as drawn:
        draw_all(full_view(), tmp_path)
    values, axis = drawn["results"].axes
    labels = [f"{delta}validation loss (nats); lower is better" for delta in ("", "Δ ")]
    assert [values.get_xlabel(), axis.get_xlabel()] == labels
    rows = [label.get_text() for label in values.get_yticklabels()]
    assert [*rows[:2], rows[4]] == ["small.uniform (baseline)", "small.rising", "small.again (other seeds)"]
    summary, place = full_view().summaries[6], 6
    assert rows[place] == summary.label == "large.rising"
    singles = next(line for line in axis.lines if list(line.get_ydata()) == [place] * 3)
    assert list(singles.get_xdata()) == pytest.approx(list(summary.differences.values()))
    bars = [bar.get_segments()[0] for bar in axis.collections]
    (ends,) = (([start[0], end[0]]) for start, end in bars if start[1] == place)
    assert tuple(ends) == pytest.approx((summary.differences.interval.low, summary.differences.interval.high))


def test_pictures_without_figures_are_left_out(tmp_path):
    (tmp_path / "training_flops.svg").write_bytes(b"of an earlier report")
    variants = {"control": {}, "slow": {"lr_rules": ["upper_qk"]}}
    drawn = draw_all(view(small_study(baseline="control", variants=variants), lambda run: 3.5), tmp_path)
    assert set(drawn) == {"results"}
    assert {path.name for path in tmp_path.iterdir()} == {"results.svg"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "report").write_text("a file")
    with pytest.raises(UserError, match=r"results\.svg"):
        draw_all(full_view(), tmp_path / "report")


def test_the_history_of_heads_is_that_of_the_rows(tmp_path):
    uniform, growing = grown_view().summaries
    history = growing.runs[1].head_history
    assert [history[step][3] for step in (0, 20, 40, 80)] == [1, 2, 4, 4]
    assert uniform.runs[1].head_history == {0: (8,) * 4, 80: (8,) * 4}
    assert result(uniform.runs[1].planned, []).head_history == {}
    with keeping_figures() as grown:
        draw_all(grown_view(), tmp_path)
    (axis,) = grown["growing_heads"].axes
    assert [line.get_label() for line in axis.lines] == [f"layer {layer}" for layer in range(1, LAYERS + 1)]
    upper = [places(axis.lines[3])[step] for step in (0, 20, 40, 60, 80)]  # of two seeds
    assert upper == [1, 2, 4, 4, 4]


def by_hand(heads):
    """6 N_matmul + 12 L T A, of a llama block with heads of 16."""
    d, ffn, vocab, T = 128, 384, 2048, 256
    A = 16 * heads
    return 6 * (LAYERS * (4 * d * A + 3 * d * ffn) + d * vocab) + 12 * LAYERS * T * A


def test_flops_of_a_run_that_grows_are_those_of_its_heads_at_the_time():
    found = grown_view()
    uniform, growing = (summary.runs[2] for summary in found.summaries)
    tokens = 1024
    expected = tokens * (20 * by_hand(1) + 40 * by_hand(2) + 20 * by_hand(4))
    assert growing.training_flops == pytest.approx(expected, rel=1e-12)
    assert uniform.training_flops == pytest.approx(tokens * 80 * by_hand(8), rel=1e-12)
    assert result(found.study.runs[0], []).training_flops is None  # without a checkpoint


def test_curves_of_pilots_and_what_they_chose(tmp_path):
    variants = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}}
    values = {"baseline": "uniform", "variants": variants, "pilot_seeds": [9]}
    values["tune"] = {"optimizer.learning_rate": [1e-3, 2e-3, 4e-3]}
    tried = [(1e-3, 4.1), (2e-3, 4.0), (4e-3, None)]
    tuned = {name: Tuned("optimizer.learning_rate", 2e-3, False, tried, [9]) for name in variants}
    write_tuned(tmp_path, tuned)
    study = small_study(tmp_path, **values)
    with keeping_figures() as made:
        found = draw_all(view(study, {}), tmp_path)
    assert "tuned" in found
    (axis,) = made["tuned"].axes
    curve, chosen = axis.lines[:2]
    assert places(curve) == {1e-3: 4.1, 2e-3: 4.0}  # the failed one is left out
    assert list(chosen.get_xdata()) == [2e-3, 2e-3]
    assert axis.get_xscale() == "log"
