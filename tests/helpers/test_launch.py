"""The helper that starts whole programs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.helpers.launch import launch, start

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["OMP_NUM_THREADS"])
if "hang" in sys.argv:
    print("waiting")
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_ranks_get_arguments_and_environment(script: Path) -> None:
    finished = launch(["--seed", "1"], 2, script=script, env={"OMP_NUM_THREADS": "3"})
    assert finished.returncodes == [0, 0] and finished.returncode == 0
    assert finished.outputs[1] == "rank 1 of 2 ['--seed', '1'] 3\n"


def test_one_rank_is_killed_and_the_others_are_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.launch.GRACE", 0.2)
    began = time.monotonic()
    with start(["hang"], 2, script=script) as running:
        running.wait_for("waiting", rank=0)
        running.wait_for("waiting", rank=1)
        running.kill(rank=1, signal_number=signal.SIGTERM)
        finished = running.wait(30)
    assert finished.returncode == -signal.SIGTERM
    assert finished.returncodes == [-signal.SIGKILL, -signal.SIGTERM]
    assert time.monotonic() - began < 20


def test_time_limit_and_missing_text_show_the_output(script: Path) -> None:
    with pytest.raises(AssertionError, match=r"still running after 1 s:\nrank 0"):
        launch(["hang"], script=script, timeout=1)
    with start([], script=script) as running, pytest.raises(AssertionError, match="ended without 'no such'"):
        running.wait_for("no such", timeout=20)
