"""A process is told from a later one with its number."""

import os
import subprocess
import sys

import pytest

from pretrain.utils import processes
from pretrain.utils.processes import identity


@pytest.fixture(params=["linux", "elsewhere"])
def system(request, monkeypatch, tmp_path):
    if request.param == "elsewhere":
        monkeypatch.setattr(processes, "_PROC", tmp_path)


def test_a_process_has_one_as_long_as_it_lives(system):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        first = identity(other.pid)
        assert first is not None and first == identity(other.pid) != identity(os.getpid())
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert identity(other.pid) is None, "a zombie"
    assert identity(other.pid) is None


@pytest.mark.parametrize("number", [-1, 2**31, 10**30])
def test_numbers_that_are_nobodys(system, number):
    assert identity(number) is None
