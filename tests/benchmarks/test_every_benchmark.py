"""Every benchmark runs, with its smallest arguments, and refuses bad input as the commands do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "bounds": "--shape rehearsal",
    "checkpoint_pause": "--model prism-micro --rounds 1",
    "conversion_memory": "--model prism-nano --worlds zero2",
    "diagnostics_cost": "--model prism-micro --rounds 1",
    "growth": "--model uniform-micro --steps 1 --every 10",
    "kernels": "loss --tokens 64 --vocabulary 512",
    "memory": "--model prism-nano --stages 2 --precisions fp32 --data_parallel 1 --checkpointing 0",
    "scaling": "--shape rehearsal --rounds 1 --steps 1 --tokens 512 --context 256 --layers --vocabulary "
    "--accumulation --ranks",
    "throughput": "--shape rehearsal --rounds 1 --contenders ours products",
    "traffic": "prism-nano --micro_batch 1",
    "wide_heads": "--width 48 --batch 2 --length 64 --head_dims 8",
}
ELSEWHERE = {"coordinates", "update_sizes"}, {"machine", "profile_step"}, {"speedrun"}
"""Tests beside this file, of benchmarks/gpu.sh, and in tests/scenarios/test_speedrun.py."""
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
    assert programs == set(COMMANDS).union(*ELSEWHERE) | NOT_HERE


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_and_writes_its_figures(name, tmp_path):
    data = ["--data_root", str(tmp_path)] if name in ("scaling", "throughput") else []
    finished = run(name, *COMMANDS[name].split(), *data, "--out", str(tmp_path / "figures.json"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.strip()
    assert json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["memory", "traffic"])
def test_bad_input_is_one_line(name):
    arguments = ["nope"] if name == "traffic" else ["--model", "nope"]
    finished = run(name, *arguments)
    assert finished.returncode == 2
    assert finished.stderr == "error: model: no preset 'nope'; `python -m pretrain.presets` lists them\n"
