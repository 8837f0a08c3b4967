"""Which of a process's ancestors launched it as a rank."""

import os
import subprocess
import sys

import psutil
import pytest

from pretrain.runtime.environment import SCHEDULER, find_ended, find_launchers, is_launcher


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("/opt/env/bin/python /opt/env/bin/deepspeed --num_gpus 2 pretrain/main.py", True),
        ("/opt/env/bin/python -u -m deepspeed.launcher.launch --world_info=x pretrain/main.py", True),
        ("python3 /opt/env/bin/torchrun --nproc_per_node 2 pretrain/main.py", True),
        ("python -m torch.distributed.run pretrain/main.py", True),
        ("bash -c torchrun pretrain/main.py", False),
        ("nohup python pretrain/main.py --name deepspeed", False),
        ("python pretrain/main.py -m torch", False),
        ("srun python -u pretrain/main.py", False),
        ("", False),
    ],
)
def test_command_lines(command, is_one):
    assert is_launcher(command.split()) is is_one


def test_one_that_ends_is_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        known = [psutil.Process(), psutil.Process(other.pid)]
        assert find_ended(known) is None
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert find_ended(known) == other.pid, "a zombie"
        other.wait()
        assert find_ended(known) == other.pid


def test_what_trains_a_study_is_one(monkeypatch):
    """Whatever its command line: a program of the user's, a notebook's kernel."""
    parent = os.getppid()
    monkeypatch.delenv(SCHEDULER, raising=False)
    before = {process.pid for process in find_launchers()}
    monkeypatch.setenv(SCHEDULER, str(parent))
    assert {process.pid for process in find_launchers()} == before | {parent}
