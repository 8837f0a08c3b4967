"""Contrasts of a report, by hand and by scipy; what cannot be compared is left out with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from scipy.stats import ttest_1samp

from pretrain.study.command import main
from pretrain.study.comparable import check_comparable
from pretrain.study.report.contrasts import contrast_notes, contrasted
from pretrain.study.report.page import intervals_say, write_report
from pretrain.study.report.summaries import OTHER_SEEDS, View
from pretrain.study.report.tables import NOTHING, sections
from tests.helpers.planted_runs import planned_study, plant, planted_rows, result

VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "falling": {"heads": "8,8,4,2"}}
CONTRASTS = {
    "order": {"plus": ["one.rising"], "minus": ["one.falling"]},
    "order by width": {"plus": ["one.rising", "two.falling"], "minus": ["one.falling", "two.rising"]},
}
LOSSES = {
    "one": {"uniform": [3.5, 3.6, 3.4], "rising": [3.48, 3.55, 3.44], "falling": [3.51, 3.57, 3.49]},
    "two": {"uniform": [3.1, 3.2, 3.0], "rising": [3.12, 3.21, 3.04], "falling": [3.11, 3.19, 3.01]},
}


def study_of(folder=Path("runs/contrasts"), contrasts=CONTRASTS, **changes):
    values = {
        "title": "Two widths",
        "recipe": "micro",
        "seeds": 3,
        "settings": {"steps": 80, "global_batch_tokens": 512},
        "comparisons": {
            "one": {"baseline": "uniform", "variants": VARIANTS},
            "two": {
                "baseline": "uniform",
                "variants": VARIANTS,
                "settings": {"architecture": {"d_model": 256}},
            },
        },
        "contrasts": contrasts,
    }
    return planned_study(folder, **(values | changes))


def view_of(study, without=(), **changes):
    """All runs finished with LOSSES; *changes* are of the runs of a comparison."""
    results = []
    for run in study.runs:
        rows = planted_rows(run, LOSSES[run.comparison][run.variant][run.seed - 1])
        rows = [] if run.name in without else rows
        results.append(result(run, rows, **(changes.get(run.comparison, {}) if rows else {})))
    return View(study, results, check_comparable(study, results))


def test_values_and_intervals_by_hand():
    order, by_width = contrasted(view_of(study_of()))
    assert order.values == pytest.approx({1: -0.03, 2: -0.02, 3: -0.05})
    expected = ttest_1samp([-0.03, -0.02, -0.05], 0).confidence_interval(0.95)
    assert (order.interval.low, order.interval.high) == pytest.approx(tuple(expected), abs=1e-9)
    # A difference of differences is halved: two names on each side, of which the mean counts.
    assert by_width.values == pytest.approx({1: -0.02, 2: -0.02, 3: -0.04})
    assert order.mean == pytest.approx(-0.1 / 3)


def test_a_seed_counts_when_all_its_runs_are_finished():
    order, by_width = contrasted(view_of(study_of(), without=("two-rising-s2", "one-falling-s3")))
    assert list(order.values) == [1, 2] and list(by_width.values) == [1] and by_width.interval is None


def test_the_table():
    view = view_of(study_of(), without=("two-rising-s2",))
    found = next(section for section in sections(view) if section.title == "Contrasts")
    (table,) = found.tables
    assert table.title == "validation loss (nats per token)"
    assert [row[0] for row in table.rows] == ["order", "order by width"]
    assert table.rows[0][1:4] == ("one.rising − one.falling", "-0.0333 [-0.0713, +0.0046]", "3 of 3")
    assert table.rows[1][1] == "mean of (one.rising, two.falling) − mean of (one.falling, two.rising)"
    assert "half of it" in found.notes[0]
    none = view_of(study_of(), without=[run.name for run in study_of().runs if run.variant == "rising"])
    found = next(section for section in sections(none) if section.title == "Contrasts")
    assert not found.tables and len(found.left_out) == 2 and NOTHING not in found.left_out[0]


def test_they_are_among_the_intervals_that_are_counted():
    lines = intervals_say(view_of(study_of()))
    assert (
        "contrast order (one.rising − one.falling): -0.0333 [-0.0713, +0.0046], 3 seeds. The interval includes zero."
        in lines
    )
    assert lines[-1].startswith("6 comparisons made; ") and "0.3 of 6 would do so" in lines[-1]


def test_another_text_is_left_out_with_the_reason():
    view = view_of(study_of(), two={"data": {"data": [["deadbeef", "1"]]}})
    order, by_width = contrasted(view)
    assert order.values and not by_width.values and "validated on different texts" in by_width.left_out
    found = next(section for section in sections(view) if section.title == "Contrasts")
    assert found.left_out[0].startswith("order by width: its runs were validated on different texts: ")


def test_other_tokenizers_are_compared_in_bits_per_byte():
    view = view_of(study_of(), two={"data": {"tokenizer": "other"}})
    order, by_width = contrasted(view)
    assert (order.measure, by_width.measure) == ("val_loss", "val_bpb")
    assert by_width.values == pytest.approx({1: -0.02 / 3, 2: -0.02 / 3, 3: -0.04 / 3})
    assert contrast_notes(view)[0].startswith("contrast order by width: tokenizers differ, so bits per byte")
    found = next(section for section in sections(view) if section.title == "Contrasts")
    assert len(found.tables) == 2


def test_other_code_in_another_comparison_is_a_note():
    (note,) = contrast_notes(view_of(study_of(), two={"world": {"code": ["other"]}}))
    assert note.startswith("contrast order by width: the runs are of several versions of the code")


def test_other_seeds_are_said():
    variants = {"uniform": {"heads": "8x4"}, "again": {"heads": "4x4", "seed_shift": 100}}
    contrasts = {"again": {"plus": "again", "minus": "uniform"}}
    study = planned_study(
        Path("runs/again"), recipe="micro", seeds=2, baseline="uniform", variants=variants, contrasts=contrasts,
        settings={"steps": 80},
    )  # fmt: skip
    results = [result(run, planted_rows(run, 3.5 + 0.01 * run.run.seed)) for run in study.runs]
    view = View(study, results, check_comparable(study, results))
    assert contrasted(view)[0].other_seeds
    found = next(section for section in sections(view) if section.title == "Contrasts")
    assert found.tables[0].rows[0][0] == f"again, {OTHER_SEEDS}"


def test_a_folder_that_was_run_before_its_study_had_contrasts(tmp_path, capsys):
    study = study_of(tmp_path / "old")
    values = yaml.safe_load(study.text)
    del values["contrasts"]
    for run in view_of(study).results:
        plant(run)
    (tmp_path / "old/study.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (tmp_path / "new.yaml").write_text(study.text)
    assert main(["report", str(tmp_path / "new.yaml"), "--out", str(tmp_path / "old")]) == 0
    assert "contrast order (one.rising" in (tmp_path / "old/report/report.md").read_text()
    assert main(["report", str(tmp_path / "old")]) == 0
    assert "contrast order" not in (tmp_path / "old/report/report.md").read_text()


def test_they_are_in_the_numbers_and_on_the_page(tmp_path):
    study = study_of(tmp_path)
    (tmp_path / "gone-s1").mkdir()
    (tmp_path / "gone-s1/config.yaml").write_text("")
    write_report(study, list(view_of(study).results), tmp_path)
    numbers = json.loads((tmp_path / "report/results.json").read_text())
    first = numbers["contrasts"][0]
    assert (first["name"], first["plus"], first["minus"]) == ("order", ["one.rising"], ["one.falling"])
    assert first["values"] == pytest.approx({"1": -0.03, "2": -0.02, "3": -0.05})
    assert first["interval"]["count"] == 3 and first["excludes_zero"] is False
    text = (tmp_path / "report/report.md").read_text()
    assert "- contrast order (one.rising − one.falling)\n" in text and "## Contrasts" in text
    assert (
        "- The folder also holds 1 run that the study does not name: gone-s1. They are in no figure." in text
    )
    assert numbers["unnamed_runs"] == ["gone-s1"]
