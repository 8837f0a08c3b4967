"""Plans of a study's size, from planted pilots."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.study.command import dispatch
from pretrain.study.planning import parse_study, read_study
from pretrain.study.power import Question, pilot_differences, power_lines
from pretrain.study.running.scheduler import write_study
from pretrain.study.statistics.paired import pairs_needed, pooled_sd
from pretrain.study.summaries import View
from tests.helpers.launch import ROOT
from tests.helpers.planted_runs import plant, planted_rows, result
from tests.helpers.refusals import refused

TEXT = """
recipe: micro
settings: {steps: 50}
seeds: 3
effect: 0.02
hours: 2
machine: 2 CPU cores
baseline: uniform
variants:
  uniform: {heads: 8x4}
  prism: {}
  descending: {heads: "8,8,4,2"}
  again: {heads: 8x4, seed_shift: 1000}
"""
LOSSES = {
    "uniform": [4.00, 4.10, 4.30],
    "prism": [3.99, 4.07, 4.28],
    "descending": [4.04, 4.13, 4.31],
    "again": [4.30, 4.05, 4.01],
}
"""Last validation loss by seed."""
SD = 0.01 * (20 / 12) ** 0.5
"""Of the paired differences (-1, -3, -2) and (4, 3, 1) hundredths: squares of 2 and 4 2/3, 4 degrees of
freedom."""


def planted(folder, losses=LOSSES):
    """A pilot whose runs are finished with these losses after 30 seconds."""
    study = parse_study(TEXT, folder.name, folder)
    known = {(name, seed): loss for name, by in losses.items() for seed, loss in enumerate(by, 1)}
    row = {"step": 50, "tokens": 1000, "seconds": 30.0}
    results = [
        result(run, [row | {"val_loss": known[at]}] if (at := (run.variant, run.seed)) in known else [])
        for run in study.runs
    ]
    return View(study, results, "val_loss", 1)


@pytest.fixture
def pilot(tmp_path):
    return planted(tmp_path / "pilot")


def asked(pilot, text=None, **question):
    study = pilot.study if text is None else parse_study(text, "s", pilot.study.folder)
    return power_lines(study, Question(**question), pilot)


# ---------------------------------------------------------------------- spread


def test_pairs_of_other_seeds_and_losses_that_are_not_finite_are_left_out_and_said(tmp_path):
    pilot = planted(tmp_path / "pilot", losses=LOSSES | {"prism": [3.99, math.nan, 4.28]})
    groups, notes = pilot_differences(pilot)
    squares = 0.005**2 * 2 + (0.04 - 0.08 / 3) ** 2 + (0.03 - 0.08 / 3) ** 2 + (0.01 - 0.08 / 3) ** 2
    assert pooled_sd(groups) == pytest.approx((squares / 3) ** 0.5) and list(map(len, groups)) == [2, 3]
    assert notes == [
        "prism: 1 pairs left out: not finite numbers",
        "again is not in the spread: its seeds are not those of uniform",
    ]


# ---------------------------------------------------------------------- text and refusals


def test_the_lines(pilot):
    lines = asked(pilot)
    one = pilot.study.runs[0].run
    per_run = one.build_model_config(one.vocab_size).flops_per_token() * 50 * one.global_batch_tokens
    total = 12 * per_run  # of 30 s
    assert lines[:4] == [
        f"spread   sd {SD:.3g} of paired differences of val_loss, from 6 pairs of 2 variants in "
        f"{pilot.study.folder}",
        "needed   6 seeds to find 0.02 with a power of 80%, by a two-sided paired t-test at 5 %",
        "         6 seeds find 0.0185, and cost "
        f"{2 * total:.2e} FLOPs, 12m00s of training at the pilot's speed",
        f"study    3 seeds find 0.0421, and cost {total:.2e} FLOPs, 6m00s of training at the pilot's speed",
    ]
    assert lines[4] == f"cost     {per_run:.2e} FLOPs a run"
    single = parse_study(pilot.study.text.replace("seeds: 3", "seeds: 1"), "s", pilot.study.folder)
    expected = f"study    1 seed has no spread, so it finds no effect, and costs {total / 3:.2e} FLOPs"
    assert power_lines(single, Question(sd=0.01))[3] == expected


def test_contrasts_need_as_many_seeds_as_their_own_spread_says(pilot):
    """prism - descending: (-5, -6, -3) hundredths, whose squared deviations add up to 4 2/3."""
    sd = 0.01 * (14 / 6) ** 0.5
    contrasts = ["prism - descending", "again - uniform"]  # the second has other seeds
    lines = asked(pilot, f"{TEXT}contrasts: {contrasts}")
    needed = pairs_needed(0.02, sd)
    line = f"contrast prism - descending: sd {sd:.3g} of 3 seeds"
    assert lines[5:6] == [f"{line}, {needed} seeds to find 0.02"] and needed > 6
    assert [text for text in lines if text.startswith("contrast")] == lines[5:6]


def test_a_study_without_pairs():
    with refused("study: map-small has no baseline"):
        power_lines(read_study(ROOT / "pretrain/studies/map-small.yaml"), Question(sd=0.01, effect=0.01))


def test_the_question_comes_before_the_study(pilot):
    assert "needed   3 seeds" in asked(pilot, sd=0.001, effect=0.005)[1]
    without = TEXT.replace("effect: 0.02\n", "")
    assert asked(pilot, without)[1] == "needed   not known: the study names no effect; give --effect"


@pytest.mark.parametrize("count", [0, 1])
def test_a_pilot_with_too_few_pairs(tmp_path, count):
    losses = {name: values[:count] for name, values in LOSSES.items()}
    pilot = planted(tmp_path / "pilot", losses=losses)
    pairs = 2 * count  # one of each variant, and so no spread
    with pytest.raises(UserError, match=f"with {pairs} finished pairs is not valid; .*two or more seeds"):
        asked(pilot)
    assert "needed   5 seeds" in asked(pilot, sd=0.01)[1]


@pytest.mark.parametrize(
    "question", [{"effect": 0.0}, {"effect": math.nan}, {"sd": -0.1}, {"power": 1.0}, {"power": 0.05}]
)
def test_bad_questions(question):
    (field,) = question
    with pytest.raises(UserError, match=f"^{field}: .* is not valid"):
        Question(**question)


def test_pilots_of_several_tokenizers_have_no_spread_in_nats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("asked.yaml").write_text(TEXT)
    study = parse_study(TEXT, "pilot", tmp_path / "pilot")
    write_study(study)
    for planned in study.runs:
        other = {"tokenizer": "0a0a0a0a0a0a"} if planned.variant == "prism" else {}
        plant(result(planned, planted_rows(planned, 4.0 + 0.01 * planned.seed), data=other))
    with refused("pilot: its tokenizers differ", "give measure: val_bpb"):
        dispatch(["power", "asked.yaml", "--pilot", "pilot"])
    Path("asked.yaml").write_text(f"{TEXT}measure: val_bpb\n")
    assert dispatch(["power", "asked.yaml", "--pilot", "pilot"]) == 0
