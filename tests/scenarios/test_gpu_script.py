"""benchmarks/gpu.sh where there is no GPU: its rehearsal, and what it says to bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def gpu_sh(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"REHEARSE": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    command = [str(ROOT / "benchmarks/gpu.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("rehearsal", ["1", ""])
def test_an_unknown_part_is_told_with_the_list(tmp_path, rehearsal):
    finished = gpu_sh(tmp_path, "--only", "speed", REHEARSE=rehearsal)
    assert finished.returncode == 2
    shape = "rehearsal" if rehearsal else "124m"
    assert finished.stderr.startswith("error: --only: speed is not valid; valid: machine rates tests corpus ")
    assert f" speed-{shape} schedules-{shape} " in finished.stderr and finished.stderr.count("\n") == 1


def test_missing_packages_are_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    finished = gpu_sh(tmp_path / "out", "--only", "machine", PYTHON=str(bare), PYTHONPATH="")
    assert finished.returncode == 1
    assert "machine: cannot run: not installed: torch" in finished.stdout


def test_no_part_is_begun_when_the_limit_is_near(tmp_path):
    finished = gpu_sh(tmp_path / "out", "--only", "machine", LIMIT="60")
    assert finished.returncode == 1 and "machine: not begun: LIMIT is near" in finished.stdout
    assert not (tmp_path / "out" / "machine.log").exists()


@pytest.mark.slow
def test_the_rehearsal_of_cheap_parts(tmp_path):
    out, data = tmp_path / "out", str(tmp_path / "data")
    parts = ["machine", "profile-rehearsal-compile-false"]
    for part in parts:
        finished = gpu_sh(out, "--only", part, DATA=data)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert (out / f"{part}.rehearsed").exists() and (out / f"{part}.log").exists()
    assert json.loads((out / "machine.json").read_text())["compiling"]
    profile = json.loads((out / "profile-rehearsal-compile-false.json").read_text())
    assert profile["seconds"] > 0 and any(row["name"] == "aten::mm" for row in profile["operators"])
    tried = [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]
    assert [(row["part"], row["status"]) for row in tried] == [(part, 0) for part in parts]
