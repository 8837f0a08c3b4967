"""A launcher's environment in which the ranks could not meet is refused, in one line, before anything is
imported."""

import os
import socket
import subprocess
import sys

import pytest

from model.errors import MachineError, UserError
from pretrain.runtime import environment as module
from pretrain.runtime.environment import Launch, check_environment, check_threads, environment_rank
from tests.helpers.launch import ROOT

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "DS_ACCELERATOR"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
BAD = [
    ({"RANK": "abc"}, "RANK: 'abc' in the environment is not valid; give an integer from 0"),
    ({"RANK": "-1"}, "RANK: '-1'"),
    ({"RANK": ""}, "RANK: ''"),
    ({"RANK": "3"}, "RANK: 3 is not valid, since WORLD_SIZE is not set"),
    ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK: 5 is not valid, since WORLD_SIZE is 2"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' in the environment is not valid; give an integer from 1"),
    ({"WORLD_SIZE": "2"}, "RANK: not set, though WORLD_SIZE is 2"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK: 'x'"),
    ({"LOCAL_RANK": "3", "RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK: 3 is not valid for 2 ranks"),
    ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE: 'x'"),
    (
        {"MASTER_PORT": "99999"},
        "MASTER_PORT: '99999' in the environment is not valid; give an integer from 1",
    ),
    ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http'"),
    (
        {"DS_ACCELERATOR": "nonsense"},
        "DS_ACCELERATOR: 'nonsense' in the environment is not valid; give cpu or cuda",
    ),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_what_launchers_set(monkeypatch):
    assert module.read_environment() == Launch() == check_environment()
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert module.read_environment() == Launch(rank=3, local_rank=1, size=4, local_size=2)
    assert environment_rank() == 3
    monkeypatch.setenv("RANK", "abc")
    assert environment_rank() == 0  # of the line that refuses it


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_PORT: {port} is taken on .*--master_port"):
            check_environment()
        with monkeypatch.context() as job, pytest.raises(MachineError, match="the job's next start"):
            job.setenv("SUBMIT_LINE", "sbatch slurm/124m.sh")
            check_environment()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun's own
        check_environment()
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.setenv("RANK", "1")  # it is rank 0 that listens
        check_environment()
    monkeypatch.setenv("RANK", "0")
    check_environment()


@pytest.mark.parametrize("threads", [0, -1, 100_000, 10**14])
def test_threads_that_nothing_runs(threads):
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(UserError, match=rf"threads: .* is not valid; give 1 to {most} CPU threads per rank"):
        check_threads(threads)
    check_threads(most)
    check_threads(None)


@pytest.mark.parametrize("given", [None, "active"])
def test_waiting_threads_sleep_unless_the_environment_says_what_they_do(given):
    """In every command, before torch is loaded; nothing is written anywhere."""
    code = (
        "import os, sys; from pretrain.runtime.command import prepare_process; prepare_process()\n"
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | ({"OMP_WAIT_POLICY": given} if given else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == f"False {given or 'passive'}\n", result.stderr[-500:]
