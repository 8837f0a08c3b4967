"""What is said before runs are compared, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.study.comparable import check_comparable
from tests.helpers.planted_runs import planned_study, planted_rows, result

VARIANTS = {"uniform": {"heads": "8x4"}, "rising": {"heads": "2,4,8,8"}}


def study_of(variants=VARIANTS):
    return planned_study(
        Path("runs/compared"),
        recipe="micro",
        seeds=2,
        settings={"steps": 80, "global_batch_tokens": 512},
        baseline="uniform",
        variants=variants,
    )


def notes(study, **changes):
    """The notes on a study's finished runs; *changes* are of runs, by their name with an underscore."""
    results = [
        result(run, planted_rows(run, 3.5), **changes.get(run.name.replace("-", "_"), {}))
        for run in study.runs
    ]
    return check_comparable(study, results).notes


def test_nothing_is_said_of_runs_that_are_alike():
    assert notes(study_of()) == []


def test_windows_of_several_lengths_are_said():
    variants = VARIANTS | {"short": {"architecture": {"context_length": 64}}}
    assert notes(study_of(variants)) == [
        "the runs are validated on windows of several lengths: 256 tokens (uniform-s1, rising-s1, uniform-s2 "
        "and 1 more); 64 tokens (short-s1, short-s2)"
    ]


def test_documents_that_are_kept_apart_in_some_runs_are_said():
    (note,) = notes(study_of(VARIANTS | {"apart": {"document_mask": True}}))
    assert note.startswith(
        "the documents of a window are kept apart in some runs: not kept apart (uniform-s1, "
    )
    assert note.endswith("; kept apart (apart-s1, apart-s2)")


def test_finished_runs_without_a_checkpoint_are_said():
    study = study_of()
    results = [result(run, planted_rows(run, 3.5)) for run in study.runs]
    results[1].data.clear()
    results[1].world.clear()
    assert check_comparable(study, results).notes == [
        "no checkpoint of 1 finished run (rising-s1), so their text, tokenizer and code were not checked"
    ]


def test_other_numbers_of_ranks_and_threads_are_said():
    assert notes(study_of(), rising_s2={"world": {"ranks": 2}}) == [
        "the runs had several numbers of ranks: 1 (uniform-s1, rising-s1, uniform-s2); 2 (rising-s2)"
    ]
    threads = {name: {"world": {"threads": 1}} for name in ("uniform_s1", "rising_s1", "uniform_s2")}
    assert notes(study_of(), **threads, rising_s2={"world": {"threads": 2}}) == [
        "the runs had different CPU thread counts: 1 (uniform-s1, rising-s1, uniform-s2); 2 (rising-s2)"
    ]
    names = [*threads, "rising_s2"]
    on_gpus = {name: {"world": {"device": "cuda", "threads": n}} for n, name in enumerate(names)}
    assert notes(study_of(), **on_gpus) == []  # threads change no figure there


def test_other_texts_are_refused():
    with pytest.raises(UserError, match="validated on different texts"):
        notes(study_of(), rising_s2={"data": {"data": [["deadbeef", "1"]]}})
