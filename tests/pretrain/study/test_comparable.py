"""What is said before runs are compared, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pretrain.study.report.conftest import planted, small_study, view_of

VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}}


def notes(variants=VARIANTS, **changes):
    """The notes on a study's finished runs; *changes* are functions of a run: data, world."""
    study = small_study(seeds=2, baseline="uniform", variants=variants)
    return view_of(study, planted(study, lambda run: 3.5, **changes)).notes


def test_nothing_is_said_of_runs_that_are_alike():
    assert notes() == []


def test_windows_of_several_lengths_are_said():
    assert notes(VARIANTS | {"short": {"architecture": {"context_length": 64}}}) == [
        "the runs are validated on windows of several lengths: 256 tokens (uniform-s1, rising-s1, uniform-s2 "
        "and 1 more); 64 tokens (short-s1, short-s2)"
    ]


def test_documents_that_are_kept_apart_in_some_runs_are_said():
    (note,) = notes(VARIANTS | {"apart": {"document_mask": True}})
    assert note.startswith(
        "the documents of a window are kept apart in some runs: not kept apart (uniform-s1, "
    )
    assert note.endswith("; kept apart (apart-s1, apart-s2)")


def test_finished_runs_without_a_checkpoint_are_said():
    study = small_study(seeds=2, baseline="uniform", variants=VARIANTS)
    results = planted(study, lambda run: 3.5)
    results[1] = dataclasses.replace(results[1], saved=None)
    assert view_of(study, results).notes == [
        "no checkpoint of 1 finished run (rising-s1), so their text, tokenizer and code were not checked"
    ]


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"ranks": 2}, "the runs had several numbers of ranks: 1 ({}); 2 ({})"),
        ({"threads": 2}, "the runs had different CPU thread counts: 1 ({}); 2 ({})"),
        ({"device": "cuda"}, "the runs are of several kinds of device: cpu ({}); cuda ({})"),
        ({"dtype": "bf16"}, "the runs are of several dtypes: fp32 ({}); bf16 ({})"),
        ({"code": ["x", "y"]}, "the runs are of several versions of the code: abc123abc123 ({}); x, y ({})"),
        ({"versions": {"torch": "3"}}, "the runs are of several versions of torch: 2.7.0 ({}); 3 ({})"),
    ],
)
def test_other_worlds_are_said(world, said):
    found = notes(world=lambda run: world if run.name == "rising-s2" else None)
    assert found == [said.format("uniform-s1, rising-s1, uniform-s2", "rising-s2")]


def test_threads_change_no_figure_on_gpus():
    assert notes(world=lambda run: {"device": "cuda", "threads": run.seed}) == []
