"""Tables of a report, recomputed by hand from planted metrics; what is missing stays missing."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.stats import nct, t, ttest_rel

from model.errors import UserError
from pretrain.study.comparable import check_comparable
from pretrain.study.report.summaries import View, explanation, tokens_saved
from pretrain.study.report.tables import NOTHING, sections
from pretrain.study.results import load_results
from tests.helpers.planted_runs import planned_study, plant, planted_rows, result

# Three schedules of four layers with three seeds; losses in nats.
FINALS = {
    "uniform-s1": 3.50, "uniform-s2": 3.56, "uniform-s3": 3.47,
    "rising-s1": 3.48, "rising-s2": 3.55, "rising-s3": 3.44,
    "falling-s1": 3.51, "falling-s2": 3.55, "falling-s3": 3.49,
}  # fmt: skip
VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}, "falling": {"heads": "8,8,4,2"}}


def three(folder=Path("runs/three"), **changes):
    values = {
        "title": "Three schedules",
        "recipe": "micro",
        "seeds": 3,
        "settings": {"steps": 80, "global_batch_tokens": 512, "validation": {"every": 10}},
        "baseline": "uniform",
        "variants": VARIANTS,
    }
    return planned_study(folder, **(values | changes))


def view_of(study, results):
    results = list(results)
    return View(study, results, check_comparable(study, results))


def finished(finals=FINALS, **changes):
    """The view of a study whose runs end with these losses; a run without one is missing."""
    study = three(**changes)
    runs = ((run, planted_rows(run, finals[run.name]) if run.name in finals else []) for run in study.runs)
    return view_of(study, [result(run, rows) for run, rows in runs])


def section(view, title):
    return next(found for found in sections(view) if found.title == title)


def rows_of(view, title="Results", table=0):
    """The rows of a table by their first cell, each as cells by column."""
    found = section(view, title).tables[table]
    return {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.rows}


def test_the_main_table_by_hand():
    rows = rows_of(finished())
    # Differences of rising: -0.02, -0.01, -0.03: mean -0.02, sd 0.01, t(2) = 4.302653 -> half 0.024841.
    assert rows["rising"]["Δ [95 % interval]"] == "-0.0200 [-0.0448, +0.0048]"
    assert rows["rising"]["mean ± sd"] == "3.4900 ± 0.0557"  # of 3.48, 3.55, 3.44
    assert rows["rising"]["heads"] == "2,4,8x2" and rows["rising"]["runs"] == "3 of 3"
    assert rows["rising"]["pairs"] == "3"
    # Rows at 10, 20, … 80 steps have 9,100 … 9,800 tokens/s; the later half 9,500 … 9,800.
    assert rows["rising"]["tokens/s"] == "9,650"
    baseline = rows["uniform (baseline)"]
    assert baseline["mean ± sd"] == "3.5100 ± 0.0458"
    assert baseline["Δ [95 % interval]"] == baseline["pairs"] == baseline["detectable Δ"] == NOTHING


def test_parameters_and_flops_are_those_of_the_model():
    rows = rows_of(finished())
    # prism-micro with 2,048 rows: the embedding, four layers of 4 d² + 3 d f and two norms, and the last norm.
    parameters = 2048 * 128 + 4 * (4 * 128**2 + 3 * 128 * 384) + 9 * 128
    per_token = 6 * (4 * (4 * 128**2 + 3 * 128 * 384) + 2048 * 128) + 12 * 4 * 256 * 128
    assert rows["rising"]["parameters"] == f"{parameters:,}"
    assert rows["rising"]["training FLOPs"] == f"{per_token * 80 * 512:.3e}"


def test_intervals_are_scipys():
    view = finished()
    values = {summary.variant: list(summary.values.values()) for summary in view.summaries[""]}
    for summary in view.compared:
        expected = ttest_rel(values[summary.variant], values["uniform"]).confidence_interval(0.95)
        assert (summary.interval.low, summary.interval.high) == pytest.approx(tuple(expected), abs=1e-12)


def test_the_detectable_difference_is_found_four_times_out_of_five():
    for summary in finished().compared:
        shift = summary.detectable / stdev(summary.differences.values()) * math.sqrt(3)
        limit = t.ppf(0.975, 2)
        assert nct.sf(limit, 2, shift) + nct.cdf(-limit, 2, shift) == pytest.approx(0.8, abs=1e-6)


def test_missing_runs_are_shown_and_never_filled_in(tmp_path):
    study = three(tmp_path)
    left = {run.name: result(run, planted_rows(run, FINALS[run.name])) for run in study.runs}
    for name, points in {"rising-s2": 6, "falling-s1": 4}.items():
        left[name] = result(left[name].planned, left[name].rows[:points])
    del left["uniform-s3"]
    for name, found in left.items():
        plant(found, failed="error: disk is full" if name == "falling-s1" else None)
    results = load_results(study, tmp_path)
    done = [found for found in results if found.state == "finished"]
    assert done == [found for found in left.values() if found.state == "finished"]  # as planted
    view = view_of(study, results)
    assert view.without_result == [
        "uniform-s3: missing",
        "rising-s2: unfinished, at step 60 of 80",
        "falling-s1: failed at step 40 of 80 (error: disk is full)",
    ]
    rows, runs = rows_of(view), rows_of(view, "Runs")
    assert rows["rising"]["runs"] == "2 of 3" and rows["rising"]["mean ± sd"].startswith("3.4600")
    assert rows["rising"]["pairs"] == "1"  # seed 1: seed 2 has no result, seed 3 no baseline
    assert rows["rising"]["Δ [95 % interval]"] == "-0.0200"  # of one pair, without an interval
    assert rows["falling"]["Δ [95 % interval]"] == "-0.0100"
    assert view.summaries[""][1].interval is None
    (note,) = section(view, "Results").tables[0].notes
    assert all(line in note for line in view.without_result)
    for name in ("uniform-s3", "rising-s2", "falling-s1"):
        assert runs[name]["val_loss"] == runs[name]["Δ"] == NOTHING
    assert runs["rising-s1"]["Δ"] == "-0.020000"
    assert runs["rising-s3"]["val_loss"] == "3.440000" and runs["rising-s3"]["Δ"] == NOTHING


def test_runs_of_two_seeds_are_never_paired():
    view = finished({"uniform-s1": 3.5, "rising-s2": 3.4, "rising-s3": 3.4})
    summary = view.summaries[""][1]
    assert summary.differences == {} and summary.interval is None and tokens_saved(view, summary) == {}
    row = rows_of(view)["rising"]
    assert row["Δ [95 % interval]"] == NOTHING and row["pairs"] == "0"


def test_other_seeds_are_said_to_be():
    variants = VARIANTS | {"again": {"heads": "8x4", "seed_shift": 1000}}
    view = finished(FINALS | {f"again-s{seed}": 3.5 + 0.01 * seed for seed in (1, 2, 3)}, variants=variants)
    assert rows_of(view)["again, other seeds (not paired in data or weights)"]["pairs"] == "3"
    assert rows_of(view, "Runs")["again-s2"]["trained with"] == "1002"
    assert explanation(view, "")[1] == ["again (differs in seed)"]


def test_a_variant_may_have_a_baseline_of_its_own():
    variants = {**VARIANTS, "falling": {**VARIANTS["falling"], "against": "rising"}}
    view = finished(variants=variants)
    expected = fmean(FINALS[f"falling-s{s}"] - FINALS[f"rising-s{s}"] for s in (1, 2, 3))
    assert rows_of(view)["falling (against rising)"]["Δ [95 % interval]"].startswith(f"{expected:+.4f}")
    found = explanation(view, "")[0]  # from the comparison's baseline, all of them
    assert found.outcome["falling"] == pytest.approx(fmean(FINALS[f"falling-s{s}"] for s in (1, 2, 3)) - 3.51)


def test_the_result_is_the_mean_of_the_last_validations():
    study = three(last_validations=2)
    results = [result(run, planted_rows(run, FINALS[run.name])) for run in study.runs]
    results[1].rows[-2]["val_loss"] = 5.0
    view = view_of(study, results)
    uniform, rising, _ = view.summaries[""]
    assert rising.values[1] == pytest.approx((FINALS["rising-s1"] + 5.0) / 2)
    last_but_one = results[0].rows[-2]["val_loss"]
    assert uniform.values[1] == pytest.approx((FINALS["uniform-s1"] + last_but_one) / 2)
    assert rising.differences[1] == pytest.approx(rising.values[1] - uniform.values[1])
    assert "mean of its last 2" in section(view, "Results").notes[0]


def test_a_run_with_too_few_validations_has_no_result():
    settings = {"steps": 80, "global_batch_tokens": 512, "validation": {"every": 5}}
    view = finished(last_validations=9, settings=settings)  # the planted rows have eight
    assert not view.summaries[""][0].values
    assert "without so many values" in view.without_result[0]


def test_tokens_saved_by_hand():
    study = three(seeds=2)
    # Losses at 10, 20, … 80 steps of 512 tokens. The baseline ends at 3.0.
    curves = {
        "uniform-s1": [5, 4.5, 4, 3.8, 3.6, 3.4, 3.2, 3.0],
        "rising-s1": [5, 4.4, 3.9, 3.7, 3.5, 3.2, 2.8, 2.7],  # crosses 3.0 halfway from step 60 to 70
        "falling-s1": [5, 4.6, 4.2, 4.0, 3.8, 3.6, 3.4, 3.1],  # never
        "uniform-s2": [5, 4.5, 4, 3.8, 3.6, 3.4, 3.2, 3.0],
        "rising-s2": [5, 4.5, 4, 3.8, 3.6, 3.4, 3.2, 3.0],
        "falling-s2": [5, 4.4, 3.9, 3.7, 3.5, 3.0, 2.9, 2.8],
    }
    results = [result(run, planted_rows(run, 3.0)) for run in study.runs]
    for found in results:
        for row, loss in zip(found.rows, curves[found.planned.name], strict=True):
            row["val_loss"] = loss
    view = view_of(study, results)
    assert tokens_saved(view, view.summaries[""][1]) == pytest.approx({1: (80 - 65) / 80, 2: 0.0})
    rows = rows_of(view, "Tokens saved to reach the baseline's final loss")
    assert rows["rising"]["by seed"] == "1: 18.8%, 2: 0.0%" and rows["rising"]["mean"] == "9.4%"
    assert rows["falling"]["by seed"] == "1: not reached, 2: 25.0%"
    assert rows["falling"]["mean"] == NOTHING and rows["falling"]["pairs that reach it"] == "1 of 2"


def test_the_regression_is_numpys():
    schedules = {
        "uniform": "8x4", "rising": "2,4,8,8", "falling": "8,8,4,2", "narrow": "4x4", "mixed": "2,16,4,8",
        "wide": "16x4", "steep": "1,2,16,16",
    }  # fmt: skip
    finals = {
        f"{name}-s{seed}": 3.5 + 0.01 * place * (-1) ** place + 0.02 * seed + 0.001 * ((7 * place * seed) % 5)
        for place, name in enumerate(schedules)
        for seed in (1, 2, 3)
    }
    view = finished(finals, variants={name: {"heads": heads} for name, heads in schedules.items()})
    found, left_out = explanation(view, "")
    assert not left_out and found.outcome["uniform"] == 0
    table = np.array([[1, *values.values()] for values in found.features.values()])
    expected = np.linalg.lstsq(table, np.array(list(found.outcome.values())), rcond=None)[0]
    rows = rows_of(view, "What explains the differences", 1)
    assert [row["Δ per unit"] for row in rows.values()] == [f"{value:+.5f}" for value in expected[1:]]


def test_variants_that_differ_in_more_than_heads_explain_nothing():
    variants = VARIANTS | {"slow": {"heads": "4x4", "optimizer": {"learning_rate": 1.0e-3}}}
    view = finished(FINALS | {f"slow-s{seed}": 3.9 for seed in (1, 2, 3)}, variants=variants)
    found, left_out = explanation(view, "")
    assert left_out == ["slow (differs in optimizer.learning_rate)"] and "slow" not in found.features


def test_two_schedules_have_no_regression_and_the_report_says_why():
    variants = {"uniform": VARIANTS["uniform"], "rising": VARIANTS["rising"]}
    found = section(finished(variants=variants), "What explains the differences")
    assert not found.tables and "2 schedules" in found.left_out[0]


def test_bits_per_byte_are_compared_when_tokenizers_differ():
    study = three()
    view = view_of(
        study,
        [
            result(
                run,
                planted_rows(run, FINALS[run.name]),
                data={"tokenizer": "another" if run.variant == "rising" else "one"},
            )
            for run in study.runs
        ],
    )
    assert view.measure == view.loss == "val_bpb"
    # A third of the nats, as the rows were planted.
    assert rows_of(view)["rising"]["Δ [95 % interval]"].startswith("-0.0067")
    assert "bits per byte" in section(view, "Results").notes[0]
    assert any("tokenizers differ" in note for note in view.comparability.notes)


def test_runs_on_different_validation_texts_are_refused():
    study = three()
    results = [
        result(run, planted_rows(run, 3.5), data={"data": [[f"{run.variant:>8}", "1"]]}) for run in study.runs
    ]
    with pytest.raises(UserError, match="different texts"):
        view_of(study, results)


def test_scores_are_those_that_were_measured():
    study = three()
    results = []
    for run in study.runs:
        scores = {"evaluation/piqa/acc": 0.6 + 0.01 * run.seed + 0.02 * (run.variant == "rising")}
        more = {} if run.variant == "falling" else scores
        results.append(result(run, planted_rows(run, FINALS[run.name], **more)))
    found = section(view_of(study, results), "Zero-shot scores").tables[0]
    assert [row[:3] for row in found.rows] == [
        ("piqa/acc", "uniform (baseline)", "3"),
        ("piqa/acc", "rising", "3"),
    ]
    assert found.rows[1][3:] == ("0.6400 ± 0.0100", "+0.0200 [+0.0200, +0.0200]")


def test_without_scores_the_report_says_so():
    found = section(finished(), "Zero-shot scores")
    assert not found.tables and found.left_out == ["no finished run has measured any"]


def test_higher_accuracy_is_better():
    study = three(measure="val_accuracy", recipe="classification", settings={"steps": 80})
    view = view_of(
        study, [result(run, planted_rows(run, 3.5, val_accuracy=0.5 + 0.01 * run.seed)) for run in study.runs]
    )
    assert view.better == "higher"
    assert "Validation accuracy in share of examples; higher is better" in section(view, "Results").notes[0]


def test_grown_heads_are_those_of_the_end():
    variants = {"uniform": {"heads": "8x4"}, "grown": {"growth": {"criterion": "incrt", "maximum": 8}}}
    study = three(variants=variants)
    ends = {1: (3, 4, 8, 8), 2: (3, 4, 8, 8), 3: (2, 4, 8, 8)}
    results = []
    for run in study.runs:
        model = run.run.build_model_config(vocab_size=2048)
        grown = model.replace(heads=ends[run.seed]) if run.variant == "grown" else model
        results.append(result(run, planted_rows(run, 3.5 + 0.01 * run.seed), model=grown))
    view = view_of(study, results)
    row = rows_of(view)["grown"]
    assert row["heads"] == "3,4,8x2 or 2,4,8x2 (at the end)" and " to " in row["parameters"]
    assert any("At the end" in note for note in section(view, "Results").notes)


def test_a_run_that_diverged_leaves_no_interval():
    view = finished(FINALS | {"rising-s2": math.nan})
    row = rows_of(view)["rising"]
    assert row["mean ± sd"] == "not finite ± not finite" and row["Δ [95 % interval]"] == "not finite"
    assert rows_of(view, "Runs")["rising-s2"]["val_loss"] == "not finite"
    assert "rising (no Δ)" in explanation(view, "")[1]


def test_several_comparisons_have_tables_of_their_own():
    comparisons = {
        "scaled": {"baseline": "uniform", "variants": VARIANTS},
        "published": {
            "settings": {"architecture": {"attention_scale": "none"}},
            "baseline": "uniform",
            "variants": VARIANTS,
        },
    }
    study = planned_study(Path("runs/two"), recipe="micro", seeds=2, comparisons=comparisons)
    finals = {run.name: 3.6 if run.variant == "rising" else 3.5 for run in study.runs}
    finals["published-rising-s1"] = 4.0
    view = view_of(study, [result(run, planted_rows(run, finals[run.name])) for run in study.runs])
    assert [table.title for table in section(view, "Results").tables] == ["scaled", "published"]
    assert rows_of(view, table=0)["rising"]["Δ [95 % interval]"].startswith("+0.1000")
    assert rows_of(view, table=1)["rising"]["Δ [95 % interval]"].startswith("+0.3000")
