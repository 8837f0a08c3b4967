"""One job in a run folder; a dead one stands in nobody's way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from model.errors import MachineError, UserError
from pretrain.run.folder import NAME, RunLock
from tests.helpers.launch import ROOT
from tests.helpers.refusals import refused

HOLD = """
import sys, time
from pathlib import Path
from pretrain.run.folder import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def hold(folder):
    """Another process that takes the folder and keeps it."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_another_process_is_refused_while_it_lives(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with hold(folder) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with refused(
            f"{folder} is in use by process {other.pid} on ", ", SLURM job 77; wait", "another --name"
        ):
            RunLock(folder)
        with pytest.raises(MachineError):  # of the same job, whose earlier start is not quite gone
            RunLock(folder)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with pytest.raises(UserError) as another:
            RunLock(folder)
        assert another.type is UserError
        other.kill()
        other.wait()
        RunLock(folder).release()  # killed: at once, without waiting for anything
    RunLock(folder).release()
    assert [path.name for path in folder.iterdir()] == [NAME]


@pytest.mark.slow
def test_of_many_at_once_one_gets_it(tmp_path):
    others = [hold(tmp_path) for _ in range(4)]
    said = [other.stdout.readline().strip() for other in others if other.stdout is not None]
    for other in others:
        other.kill()
        other.communicate()
    assert sorted(said) == ["UserError"] * 3 + ["held"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("runs_dir: cannot write", "give a folder"):
        RunLock(tmp_path / "file" / "run")
