"""Traces of real steps: what they hold, and that training is the same."""

from __future__ import annotations

import gzip
import json

import pytest

from pretrain.config.command_line import parse_command_line
from pretrain.metrics.file import read_metrics
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refused
from tests.helpers.training import nano_run, session

TIMES = {"seconds", "tokens_per_second", "mfu"}


def numbers(folder):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(folder)]


def events(folder, rank=0):
    with gzip.open(folder / "profile" / f"trace-rank{rank}.json.gz") as file:
        return json.load(file)["traceEvents"]


@pytest.mark.slow
def test_two_of_four_steps_are_traced_and_the_numbers_stay(small_folder, tmp_path):
    plain = nano_run(small_folder, tmp_path, "--steps 4 --name plain --checkpoint.every 0")
    traced = nano_run(small_folder, tmp_path, "--steps 4 --name traced --checkpoint.every 0 --profile 2:3")
    for run in (plain, traced):
        assert run_distributed(session, 1, run, timeout=120)[0] == ([], None)
    assert numbers(plain.folder) == numbers(traced.folder)
    assert not (plain.folder / "profile").exists()
    found = events(traced.folder)
    names = [event.get("name", "") for event in found]
    assert "aten::linear" in names or "aten::mm" in names
    micro_batches = traced.global_batch_tokens // (64 * traced.micro_batch)
    # Once for each micro-batch of the two steps, and never in the validation at step 4.
    assert names.count("aten::embedding") == 2 * micro_batches
    assert "Self CPU" in (traced.folder / "profile/operations-rank0.txt").read_text()


@pytest.mark.slow
def test_every_rank_has_a_trace(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--steps 2 --checkpoint.every 0 --profile 1:1")
    assert run_distributed(session, 2, run, timeout=120)[0] == ([], None)
    assert sorted(path.name for path in (run.folder / "profile").glob("trace*")) == [
        "trace-rank0.json.gz",
        "trace-rank1.json.gz",
    ]


@pytest.mark.parametrize("text", ["5", "0:2", "3:2", "2:13", "a:b", "1:2:3", "１:２"])
def test_bad_ranges_are_one_line(text):
    with refused("give FIRST:LAST, steps of the run from 1 to 12", begins="profile: "):
        parse_command_line(["--steps", "12", "--profile", text])
