"""Tables of a report, recomputed by hand from planted metrics; what is missing stays missing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest

from pretrain.study.report.page import describe_opening
from pretrain.study.report.tables import NOTHING
from pretrain.study.results import load_results
from pretrain.study.running.scheduler import write_study
from pretrain.study.summaries import build_view
from tests.helpers.planted_runs import plant, planted_rows, result
from tests.pretrain.study.report.conftest import SETTINGS, planted, rows_of, small_study, table_of, view

# Three schedules of four layers with three seeds; losses in nats.
VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "falling": {"heads": "8,8,4,2"}}
LOSSES = {"uniform": (3.50, 3.56, 3.47), "rising": (3.48, 3.55, 3.44), "falling": (3.51, 3.55, 3.49)}
FINALS = {f"{name}-s{s}": loss for name, losses in LOSSES.items() for s, loss in enumerate(losses, 1)}
EVERY_TEN = SETTINGS | {"validation": {"every": 10}}
GAP, SPREAD = "Δ [95 % interval]", "mean ± sd"


def three(*folder, **changes):
    return small_study(
        *folder, **({"settings": EVERY_TEN, "baseline": "uniform", "variants": VARIANTS} | changes)
    )


def finished(finals=FINALS, **changes):
    """The view of a study whose runs end with these losses; a run without one is missing."""
    return view(three(**changes), finals)


def test_the_main_table_by_hand():
    rows = rows_of(finished())
    # Differences of rising: -0.02, -0.01, -0.03: mean -0.02, sd 0.01, t(2) = 4.302653 -> half 0.024841.
    assert rows["rising"][GAP] == "-0.0200 [-0.0448, +0.0048]"
    assert rows["rising"][SPREAD] == "3.4900 ± 0.0557"  # of 3.48, 3.55, 3.44
    assert rows["rising"]["heads"] == "2,4,8x2" and rows["rising"]["runs"] == "3 of 3"
    assert rows["rising"]["pairs"] == "3"
    # prism-micro with 2,048 rows: the embedding, four layers of 4 d² + 3 d f and two norms, the last norm.
    parameters = 2048 * 128 + 4 * (4 * 128**2 + 3 * 128 * 384) + 9 * 128
    per_token = 6 * (4 * (4 * 128**2 + 3 * 128 * 384) + 2048 * 128) + 12 * 4 * 256 * 128
    assert rows["rising"]["parameters"] == f"{parameters:,}"
    assert rows["rising"]["training FLOPs"] == f"{per_token * 80 * 512:.3e}"
    baseline = rows["uniform (baseline)"]
    assert baseline[SPREAD] == "3.5100 ± 0.0458"
    assert baseline[GAP] == baseline["pairs"] == NOTHING


def test_missing_runs_are_shown_and_never_filled_in(tmp_path):
    left = {found.planned.name: found for found in planted(three(tmp_path), FINALS)}
    for name, points, failure in (("rising-s2", 6, ""), ("falling-s1", 4, "error: disk is full")):
        left[name] = result(left[name].planned, left[name].rows[:points], failure=failure)
    del left["uniform-s3"]
    for found in left.values():
        plant(found)
    results = load_results(three(tmp_path))
    assert [found for found in results if found.state != "missing"] == list(left.values())  # as planted
    found = build_view(three(tmp_path), results)
    assert describe_opening(found)["Not finished"] == [
        "rising-s2: unfinished at step 60 of 80.",
        "falling-s1: failed at step 40 of 80 (error: disk is full).",
        "Not begun: uniform-s3.",
    ]
    rows, runs = rows_of(found), rows_of(found, "runs")
    assert rows["rising"]["runs"] == "2 of 3" and rows["rising"][SPREAD].startswith("3.4600")
    assert rows["rising"]["pairs"] == "1"  # seed 1: seed 2 has no result, seed 3 no baseline
    assert rows["rising"][GAP] == "-0.0200"  # of one pair, without an interval
    assert rows["falling"][GAP] == "-0.0100"
    for name in ("uniform-s3", "rising-s2", "falling-s1"):
        assert runs[name]["result"] == runs[name]["Δ"] == NOTHING
    assert runs["rising-s1"]["Δ"] == "-0.020000"
    assert runs["rising-s3"]["result"] == "3.440000" and runs["rising-s3"]["Δ"] == NOTHING


def test_what_is_special_about_differences_is_said():
    variants = {**VARIANTS, "falling": {**VARIANTS["falling"], "against": "rising"}}
    variants["again"] = {"heads": "8x4", "seed_shift": 1000}
    finals = FINALS | {f"again-s{seed}": 3.5 + 0.01 * seed for seed in (1, 2, 3)}
    found = finished(finals, variants=variants, contrasts=["again - rising"])
    assert list(rows_of(found, "contrasts")) == ["again - rising (other seeds)"]
    expected = fmean(FINALS[f"falling-s{s}"] - FINALS[f"rising-s{s}"] for s in (1, 2, 3))
    assert rows_of(found)["falling (against rising)"][GAP].startswith(f"{expected:+.4f}")
    assert rows_of(found)["again (other seeds)"]["pairs"] == "3"
    assert rows_of(found, "runs")["again-s2"]["trained with"] == "1002"


def test_a_run_with_too_few_validations_has_no_result():
    settings = SETTINGS | {"validation": {"every": 5}}
    rows = planted_rows(three().runs[0], 3.5)  # eight
    found = finished(last_validations=2, settings=settings)
    assert found.summaries[0].values[1] == pytest.approx((rows[6]["val_loss"] + rows[7]["val_loss"]) / 2)
    found = finished(last_validations=9, settings=settings)
    assert not found.summaries[0].values
    assert describe_opening(found)["Not finished"][0] == "uniform-s1: finished at step 80 of 80."


def test_scores_are_those_that_were_measured():
    def scores(run):
        score = 0.6 + 0.01 * run.seed + 0.02 * (run.variant == "rising")
        return {} if run.variant == "falling" else {"evaluation/piqa/acc": score}

    shown = table_of(view(three(), FINALS, more=scores), "scores")
    assert [tuple(row.values()) for row in shown] == [
        ("piqa/acc", "uniform (baseline)", "3", "0.6200 ± 0.0100", NOTHING),
        ("piqa/acc", "rising", "3", "0.6400 ± 0.0100", "+0.0200 [+0.0200, +0.0200]"),
    ]


def test_scores_of_other_steps_and_of_a_few_items_are_left_out(tmp_path):
    study = three(tmp_path / "s")
    write_study(study)
    for run in study.runs:
        found = result(run, planted_rows(run, 3.5))
        plant(found)
        lines = [
            {"step": 40, "evaluation/piqa/acc": 0.9, "evaluation/boolq/acc": 0.9, "scored": {"limit": None}},
            {"step": 80, "evaluation/piqa/acc": 0.9, "scored": {"limit": 5}},
        ]
        if run.seed == 1:
            lines.append({"step": 80, "evaluation/piqa/acc": 0.6, "scored": {"limit": None}})
        (run.folder / "evaluation.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = table_of(build_view(study, load_results(study)), "scores")
    found = {(row["task/metric"], row["runs"], row["mean ± sd"]) for row in shown}
    assert found == {("piqa/acc", "1", "0.6000")}


def test_grown_heads_are_those_of_the_end():
    variants = {"uniform": {"heads": "8x4"}, "grown": {"growth": {"criterion": "incrt", "maximum": 8}}}
    study = three(variants=variants)
    model = study.runs[1].run.build_model_config(vocab_size=2048)
    ends = {1: (3, 4, 8, 8), 2: (3, 4, 8, 8), 3: (2, 4, 8, 8)}
    grown = {"model": lambda run: model.replace(heads=ends[run.seed]) if run.run.growth.active else None}
    row = rows_of(view(study, lambda run: 3.5 + 0.01 * run.seed, **grown))["grown"]
    assert row["heads"] == "3,4,8x2 or 2,4,8x2" and " to " in row["parameters"]


def test_a_run_that_diverged_leaves_no_interval():
    found = finished(FINALS | {"rising-s2": math.nan})
    row = rows_of(found)["rising"]
    assert row[SPREAD] == "not finite ± not finite" and row[GAP] == "not finite"
    assert rows_of(found, "runs")["rising-s2"]["result"] == "not finite"


def test_of_accuracies_a_low_one_is_an_outlier():
    variants = {name: VARIANTS[name] for name in ("uniform", "rising")}
    accuracy = {f"{name}-s{seed}": 0.9 + 0.002 * seed for name in variants for seed in range(1, 6)}
    accuracy |= {"rising-s2": 0.5, "uniform-s4": 0.99}
    more = {"more": lambda run: {"val_accuracy": accuracy[run.name]}}
    found = view(three(seeds=5, variants=variants), lambda run: 3.5, **more)
    assert replace(found, measure="val_accuracy").outliers == {"rising-s2"}
