"""An error of any rank is heard once, with its rank, and ends them all soon."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from pretrain.runtime.exit import end_after, leave_after_rank_0
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import ROOT, start
from tests.helpers.training import nano_arguments

HOST = socket.gethostname()
BROKEN = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import pretrain.trainer as trainer
from model.errors import UserError
original = trainer.Trainer._count
def count(self, applied):
    original(self, applied)
    if self.state.step == 3 and self.session.world.rank == {rank}:
        raise {error}
trainer.Trainer._count = count
runpy.run_path({root!r} + "/pretrain/main.py", run_name="__main__")
"""


def broken(folder, data, rank, error):
    """Two ranks, one of which raises; how they ended, and the seconds from the first end to the last."""
    script = folder / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT), rank=rank, error=error))
    arguments = nano_arguments(data, folder, "--ds_config ds_configs/zero1.json")
    with start(arguments, 2, script=script, forked=True) as running:
        running.processes[rank].wait(timeout=120)
        failed = time.monotonic()
        finished = running.wait()
        return finished, time.monotonic() - failed


ERRORS = [
    ('UserError("data: token 9999")', 2, f"error: rank 1 on {HOST}: data: token 9999"),
    ('ZeroDivisionError("of this rank")', 1, f"error: rank 1 on {HOST} failed:"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code", "said"), ERRORS)
def test_an_error_of_another_rank_is_heard_once(small_folder, tmp_path, error, code, said):
    finished, seconds = broken(tmp_path, small_folder, 1, error)
    assert finished.returncodes == [code, code]
    assert said in finished.outputs[1] and finished.output.count("error:") == 1
    assert ("Traceback" in finished.output) == (code == 1)
    assert seconds < 30


@pytest.mark.slow
def test_ranks_that_lose_rank_0_say_so_last(small_folder, tmp_path):
    finished, seconds = broken(tmp_path, small_folder, 0, 'ZeroDivisionError("of this rank")')
    assert finished.returncodes == [1, 1] and seconds < 30
    own, other = finished.outputs
    assert f"error: rank 0 on {HOST} failed:" in own and "ZeroDivisionError: of this rank" in own
    assert f"error: rank 1 on {HOST} lost rank 0, which ended first" in other and "Traceback" not in other


def test_bad_input_that_all_ranks_see_is_one_line(tmp_path):
    with start(["--ds_config", "ds_configs/none.json", "--runs_dir", str(tmp_path)], 2) as running:
        finished = running.wait()
    assert finished.returncodes == [2, 2]
    assert finished.output.count("error:") == 1 and "error: ds_config: cannot read" in finished.outputs[0]


@pytest.mark.slow
def test_bad_input_on_one_node_only_is_said_by_its_first_rank(tmp_path):
    """Rank 1 is the first of its node, and no other rank sees what it sees."""
    arguments = ["--ds_config", "ds_configs/none.json", "--runs_dir", str(tmp_path)]
    with start(arguments, 2, env_of={1: {"LOCAL_RANK": "0"}}) as running:
        running.kill(rank=0)
        code = running.processes[1].wait(timeout=60)
        assert code == 2 and f"error: rank 1 on {HOST}: ds_config: cannot read" in running.output(1)


def test_a_rank_that_the_launcher_ends_while_it_waits_adds_nothing():
    """srun ends the ranks of other nodes with SIGTERM as soon as rank 0 has failed."""
    script = (
        "from model.errors import UserError\n"
        "from pretrain.runtime.exit import end_after\n"
        "print('waiting', flush=True)\n"
        "end_after(UserError('steps: -1 is not positive'), 1, wait=30.0)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=10)
    assert process.returncode == 2 and rest == ""


def test_a_full_disk_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        end_after(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"), 0)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: runs/a/metrics.jsonl: No space left on device\n"


def seconds_to_leave():
    rank = dist.get_rank()
    began = time.monotonic()
    if rank == 0:
        time.sleep(1.0)
    leave_after_rank_0(rank, seconds=20.0)
    return time.monotonic() - began


def test_the_others_leave_after_rank_0():
    seconds = run_distributed(seconds_to_leave, 2)
    assert min(seconds) > 0.9 and max(seconds) < 10
