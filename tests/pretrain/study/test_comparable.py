"""What is said before runs are compared, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from pretrain.study.summaries import build_view
from tests.pretrain.study.report.conftest import planted, small_study

VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}}


def notes(variants=VARIANTS, **changes):
    """The notes on a study's finished runs; *changes* are functions of a run: data, world."""
    study = small_study(seeds=2, baseline="uniform", variants=variants)
    return build_view(study, planted(study, lambda run: 3.5, **changes)).notes


def test_nothing_is_said_of_runs_that_are_alike():
    assert notes() == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": {"context_length": 64}}, "context length: 256 ({}); 64 (new-s1, new-s2)"),
        ({"document_mask": True}, "document mask: False ({}); True (new-s1, new-s2)"),
    ],
)
def test_settings_that_change_what_is_measured_are_said(settings, said):
    names = "uniform-s1, rising-s1, uniform-s2 and 1 more"
    assert notes(VARIANTS | {"new": settings}) == [f"the runs differ in {said.format(names)}"]


def test_finished_runs_without_a_checkpoint_are_said():
    study = small_study(seeds=2, baseline="uniform", variants=VARIANTS)
    results = planted(study, lambda run: 3.5)
    results[1] = dataclasses.replace(results[1], saved=None)
    assert build_view(study, results).notes == [
        "finished runs without a checkpoint (rising-s1): their text, tokenizer and code were not checked"
    ]


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"device": "cuda"}, "kind of device: cpu ({}); cuda ({})"),
        ({"dtype": "bf16"}, "dtype: fp32 ({}); bf16 ({})"),
        ({"code": ["x", "y"]}, "version of the code: abc123abc123 ({}); x, y ({})"),
        ({"versions": {"torch": "3"}}, "version of torch: 2.7.0 ({}); 3 ({})"),
    ],
)
def test_other_worlds_are_said(world, said):
    found = notes(world=lambda run: world if run.name == "rising-s2" else None)
    assert found == ["the runs differ in " + said.format("uniform-s1, rising-s1, uniform-s2", "rising-s2")]
