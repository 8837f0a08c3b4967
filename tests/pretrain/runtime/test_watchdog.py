"""A process that hangs is found, says where, and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from pretrain.runtime.watchdog import HUNG, Watchdog
from tests.helpers.launch import ROOT
from tests.helpers.marks import slow

HEAD = """
import ctypes, sys
from pathlib import Path
from pretrain.runtime.watchdog import *
folder = Path(sys.argv[1])
"""


def run(body: str, folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + body, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_stacks_are_written_and_the_process_ends(tmp_path):
    body = """
def hang_here():
    ctypes.CDLL(None).sleep(60)
with Watchdog(0.5, folder / "stacks", 3, grace=0.2) as dog:
    dog.heartbeat("step 7")
    hang_here()
"""
    done = run(body, tmp_path)
    assert done.returncode == HUNG
    assert (
        "error: watchdog: rank 3 made no progress for 0.5 s while step 7; the stacks of every rank are in"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    text = (tmp_path / "stacks" / "stacks_rank_00003.txt").read_text()
    assert "hang_here" in text and "while step 7" in text


@pytest.mark.slow
def test_what_nccl_recorded_is_written_beside_the_stacks(tmp_path):
    """Builds of torch without NCCL have no recorder: a stand-in answers."""
    body = """
import types
sys.modules["torch._C._distributed_c10d"] = types.SimpleNamespace(_dump_nccl_trace=lambda: b"recorded")
with Watchdog(0.5, folder / "stacks", 3, grace=0.2) as dog:
    ctypes.CDLL(None).sleep(60)
"""
    for recorder, found in (("os.environ['TORCH_FR_BUFFER_SIZE'] = '2000'", True), ("", False)):
        done = run(f"import os\n{recorder}\n{body}", tmp_path)
        assert done.returncode == HUNG, done.stderr
        assert (f"(torchfrtrace {tmp_path}/stacks --prefix nccl_rank_)" in done.stderr) == found
        assert (tmp_path / "stacks/nccl_rank_3").exists() == found
        if found:
            assert (tmp_path / "stacks/nccl_rank_3").read_bytes() == b"recorded"
            (tmp_path / "stacks/nccl_rank_3").unlink()


@pytest.mark.slow
def test_beats_keep_it_quiet(tmp_path):
    ended: list[int] = []
    with Watchdog(0.4, tmp_path, 0, end=ended.append, grace=0) as dog:
        for _ in range(10):
            time.sleep(0.1)
            dog.heartbeat("step")
    assert not ended and not list(tmp_path.iterdir())
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
@pytest.mark.parametrize("silent", [*slow([True]), False])
def test_an_error_after_the_time_follows_from_the_hang(tmp_path, silent):
    """As of a connection to a rank that has ended, in a process that was stopped meanwhile."""
    body = """
import os
with Watchdog(0.5, folder / "stacks", 0, grace=0.2) as dog:
    dog._last_heartbeat -= SILENT
    raise RuntimeError("gloo: connection closed by peer")
"""
    done = run(body.replace("SILENT", str(9 * silent)), tmp_path)
    assert done.returncode == (HUNG if silent else 1)
    assert ("Traceback" in done.stderr) != silent and ("error: watchdog" in done.stderr) == silent


@pytest.mark.slow
def test_zero_turns_it_off(tmp_path):
    with Watchdog(0, tmp_path, 0):
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_even_a_library_that_lets_no_python_run(tmp_path):
    """PyDLL keeps the interpreter's lock: only the interpreter's own watchdog can still end the process."""
    body = """
import pretrain.runtime.watchdog as module
module.LAST_RESORT_SECONDS = 0.5
with Watchdog(0.5, folder, 0):
    ctypes.PyDLL(None).sleep(60)
"""
    began = time.monotonic()
    done = run(body, tmp_path)
    assert done.returncode == 1 and "Timeout" in done.stderr and time.monotonic() - began < 30
