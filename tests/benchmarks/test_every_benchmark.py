"""Every benchmark runs, with its smallest arguments, and refuses bad input as the commands do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.same_numbers import compare

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "bounds": "--shape rehearsal",
    "checkpoint_pause": "--model prism-micro --rounds 1",
    "conversion_memory": "--model prism-nano --worlds zero2",
    "diagnostics_cost": "--model prism-micro --rounds 1",
    "growth": "--model uniform-micro --steps 1 --every 10",
    "kernels": "loss --tokens 64 --vocabulary 512",
    "memory": "--model prism-nano --stages 2 --precisions fp32 --data_parallel 1 --checkpointing 0",
    "rates": "--device cpu --widths 48 --batch 2 --length 64 --head_dims 8 24 --megabytes 1 --rounds 1",
    "scaling": "--shape rehearsal --rounds 1 --steps 1 --tokens 512 --context 256 --layers --vocabulary "
    "--accumulation --ranks",
    "throughput": "--shape rehearsal --rounds 1 --contenders ours products",
    "traffic": "prism-nano --micro_batch 1",
    "wide_heads": "--width 48 --batch 2 --length 64 --head_dims 8",
}
ELSEWHERE = {"coordinates", "gpu_kernels", "update_sizes"}, {"machine", "profile_step"}, {"speedrun"}
"""Tests beside this file, of benchmarks/gpu.sh, and in tests/scenarios/test_speedrun.py."""
CHECKOUTS = {"first_step", "same_numbers"}
"""Programs that measure or compare whole checkouts."""
NOT_HERE = {"tokenization"}
"""It needs GPT-2's vocabulary and 60 MB of text."""


def run(name, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_every_benchmark_is_listed():
    programs = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "__doc__" in path.read_text(encoding="utf-8")
    }
    assert programs == set(COMMANDS).union(*ELSEWHERE) | NOT_HERE | CHECKOUTS


@pytest.mark.slow
def test_what_is_read_up_to_the_first_step_has_no_circles():
    finished = run("first_step")
    lines = dict(line.rsplit("  ", 1) for line in finished.stdout.splitlines() if "imports" in line)
    assert finished.returncode == 0 and int(lines["circles of imports"]) == 0, finished.stderr
    assert re.search(r"^functions run +[1-9]\d+ in [1-9]\d+ files$", finished.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_checkout_trains_the_numbers_of_itself():
    finished = run("same_numbers", str(ROOT), "--only", "one rank")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.fullmatch(r"one rank +[1-9]\d+ values of 6 steps are equal\n", finished.stdout)


def test_the_first_difference_between_two_checkouts_is_named():
    rows = [{"step": 1, "train_loss": 2.5}, {"step": 2, "train_loss": 2.25}]
    other = [rows[0], {"step": 2, "train_loss": 2.25, "val_loss": 3.0}]
    assert compare(rows, [*rows]) is None
    assert compare(rows, other) == "step 2: val_loss None != 3.0"
    assert compare(rows, rows[:1]) == "2 and 1 rows"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_and_writes_its_figures(name, tmp_path):
    data = ["--data_root", str(tmp_path)] if name in ("scaling", "throughput") else []
    finished = run(name, *COMMANDS[name].split(), *data, "--out", str(tmp_path / "figures.json"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.strip()
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "traffic"])
def test_bad_input_is_one_line(name):
    arguments = ["nope"] if name == "traffic" else ["--model", "nope"]
    finished = run(name, *arguments)
    assert finished.returncode == 2
    assert finished.stderr == "error: model: no preset 'nope'; `head-schedules presets` lists them\n"
