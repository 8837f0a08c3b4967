"""The kernels that torch.compile writes for an H100, without one. Triton is not among the tested packages:
where it is missing, the error is tested."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRITON = importlib.util.find_spec("triton") is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/gpu_kernels.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(TRITON, reason="triton is installed")
def test_without_triton_it_says_what_to_install():
    finished = run("prism-nano")
    assert finished.returncode == 2
    assert re.fullmatch(r"error: triton: not installed; pip install triton==\S+, .*\n", finished.stderr)


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_kernels_are_counted_and_compiled(tmp_path):
    """Besides products and attention a block has seven kernels forward and six backward. What they move at
    least, by hand, in bf16: 22 d + 10 A + 11 F a block, 5 d of the final norm, three times the logits."""
    out = tmp_path / "found.json"
    finished = run("prism-nano", "--micro_batch", "2", "--compile", "--out", str(out))
    assert finished.returncode == 0, finished.stderr[-2000:]
    rows = re.findall(r"^\| \d+ \| (\d+) \| (\d+) \|", finished.stdout, re.MULTILINE)
    calls = {count: sum(int(row[0]) for row in rows if int(row[1]) == count) for count in (7, 6)}
    assert calls == {7: 4, 6: 4}
    found = json.loads(out.read_text())
    width, inner, vocabulary = 48, 128, 384
    least = 2 * (4 * (22 * width + 10 * width + 11 * inner) + 5 * width + 3 * vocabulary)
    assert least < found["bytes_a_token"] < 1.3 * least
    assert found["compiled"] > 15
