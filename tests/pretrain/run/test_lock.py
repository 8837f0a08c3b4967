"""One job in a run folder; a dead one's mark stands in nobody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from model.errors import UserError
from pretrain.run import lock as run_lock
from pretrain.run.lock import NAME, SILENT_SECONDS, RunLock
from tests.helpers.launch import ROOT


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_lock, "_job_lives", lambda job: None)


def holder(folder, **changes):
    """Write the mark of another job."""
    entry = {"host": "elsewhere", "pid": 17, "process": "x", "job": None, "restart": "0", **changes}
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(entry))
    return folder / NAME


def test_taken_and_released(tmp_path):
    folder = tmp_path / "run"
    lock = RunLock(folder)
    assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    lock.release()
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.lock"]


HOLD = """
import sys, time
from pathlib import Path
from pretrain.run.lock import RunLock
try:
    RunLock(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def hold(folder, seconds):
    """Another process that takes the folder and keeps it, ended by itself after some seconds."""
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def silence(mark):
    """Make a mark one whose job has sent no heartbeat for too long."""
    old = time.time() - SILENT_SECONDS - 1
    os.utime(mark, (old, old))


def test_another_process_is_refused_while_it_lives(tmp_path, monkeypatch):
    """Whatever the clock is set to meanwhile, by which psutil tells the start of a process."""
    told = psutil.Process.create_time
    with hold(tmp_path, 60) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for seconds in (0, -3600, 3600):
            monkeypatch.setattr(psutil.Process, "create_time", lambda self, by=seconds: told(self) + by)
            said = rf"{tmp_path} is in use by process {other.pid} on .*another --name"
            with pytest.raises(UserError, match=said):
                RunLock(tmp_path)
        other.kill()
        other.wait()
        RunLock(tmp_path).release()  # killed: at once, without waiting for anything


def test_a_process_number_used_again_is_another_process(tmp_path):
    lock = RunLock(tmp_path)
    entry = json.loads((tmp_path / NAME).read_text())
    lock.release()
    boot, ticks = entry["process"].split()
    for other in (f"{boot} {int(ticks) - 1}", f"another-boot {ticks}"):
        holder(tmp_path, **{**entry, "process": other})
        RunLock(tmp_path).release()


def test_on_another_host_its_sign_of_life_counts(tmp_path):
    mark = holder(tmp_path, job="77")
    said = r"process 17 on elsewhere, SLURM job 77 \(last heartbeat \d+ s ago\)"
    with pytest.raises(UserError, match=said):
        RunLock(tmp_path)
    silence(mark)
    RunLock(tmp_path).release()


def test_a_container_numbers_its_own_processes(tmp_path, monkeypatch):
    """The same host name and a number that nobody has here: the process may be inside, so it counts by
    age."""
    mark = holder(tmp_path, host=f"{run_lock.socket.gethostname()}/pid:4026532000", pid=2**22 - 3)
    with pytest.raises(UserError, match="in use by process"):
        RunLock(tmp_path)
    silence(mark)
    monkeypatch.setattr(run_lock, "INITIAL_PID_NAMESPACE", 0)  # as if this were a container
    lock = RunLock(tmp_path)
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    assert json.loads(mark.read_text())["host"] == f"{run_lock.socket.gethostname()}/pid:{namespace}"
    lock.release()


def test_slurm_knows_better(tmp_path, monkeypatch):
    mark = holder(tmp_path, job="77")
    monkeypatch.setattr(run_lock, "_job_lives", lambda job: True)
    silence(mark)
    with pytest.raises(UserError, match="SLURM job 77"):
        RunLock(tmp_path)
    holder(tmp_path, job="77")
    monkeypatch.setattr(run_lock, "_job_lives", lambda job: False)
    RunLock(tmp_path).release()


def test_the_life_before_a_requeue_is_over(tmp_path, monkeypatch):
    holder(tmp_path, job="77", restart="0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(UserError, match="SLURM job 77"):
        RunLock(tmp_path)  # another step of the same life
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunLock(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 17}', "[" * 100_000])
def test_a_damaged_mark_counts_by_its_age(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match="is in use by another job"):
        RunLock(tmp_path)
    silence(tmp_path / NAME)
    RunLock(tmp_path).release()


@pytest.mark.slow
def test_of_many_at_once_one_gets_it(tmp_path):
    holder(tmp_path, host=run_lock._host(), pid=2**22 - 3)  # a dead one's mark, too
    said = sorted(other.communicate(timeout=60)[0].strip() for other in [hold(tmp_path, 5) for _ in range(4)])
    assert said == ["UserError"] * 3 + ["held"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"runs_dir: cannot write .*file.* \(.*\); give a folder"):
        RunLock(tmp_path / "file" / "run")
