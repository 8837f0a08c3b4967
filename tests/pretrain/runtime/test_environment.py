"""A launcher's environment in which the ranks could not meet is refused, in one line, before anything is
imported."""

import os
import socket
import subprocess
import sys

import pytest

from model.errors import UserError
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


def write_proc(proc, ticks, processes):
    """A made-up /proc.

    Args:
        ticks: of each core: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice.
        processes: pid -> the job's variable, and ticks in user and system mode, own and of ended children.
    """
    proc.mkdir(exist_ok=True)
    lines = [f"cpu{core} {' '.join(map(str, numbers))}" for core, numbers in ticks.items()]
    (proc / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 5 0", "ctxt 7"]))
    for pid, (job, times) in processes.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        (proc / str(pid) / "environ").write_bytes(f"HOME=/\0{job}\0".encode())
        fields = ["S", *"1234567890", *map(str, times), "20", "0"]
        (proc / str(pid) / "stat").write_text(f"{pid} (a) b (c) {' '.join(fields)}")


# What another 10 ticks of each of two cores were: user, nice, system, irq, softirq, steal; the job's.
@pytest.mark.parametrize(
    ("core", "job", "busy"),
    [
        ([0, 0, 0, 10, 0, 0, 0, 0], [0, 0, 0, 0], False),
        ([0, 0, 0, 1, 9, 0, 0, 0], [0, 0, 0, 0], False),  # waiting for a disk
        *(([0] * place + [4] + [0] * (7 - place), [0, 0, 0, 0], True) for place in (0, 1, 2, 5, 6, 7)),
        ([3, 0, 0, 7, 0, 0, 0, 0], [0, 0, 0, 0], False),
        ([10, 0, 0, 0, 0, 0, 0, 0], [20, 0, 0, 0], False),  # the ranks themselves, which import libraries
        ([10, 0, 0, 0, 0, 0, 0, 0], [2, 3, 4, 4], False),
        ([10, 0, 0, 0, 0, 0, 0, 0], [2, 3, 4, 3], True),
    ],
)
def test_cores_are_busy_with_the_work_of_others(monkeypatch, tmp_path, core, job, busy):
    core = [*core, 3, 3]  # guests are counted as users already
    core[3] += 10 - sum(core[:8])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    before, own = [100, 5, 60, 900, 7, 1, 2, 3, 0, 0], [50, 20, 10, 5]
    later = [a + b for a, b in zip(before, core, strict=True)], [a + b for a, b in zip(own, job, strict=True)]

    def write(numbers, mine, others):
        jobs = {5: ("MASTER_PORT=29500", mine), 7: ("MASTER_PORT=29501", [others] * 4)}
        write_proc(tmp_path, {0: numbers, 1: [others] * 10, 2: numbers}, jobs)

    write(before, own, 1)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: write(*later, 99))
    assert module.busy_with_others("MASTER_PORT=29500", tmp_path) == busy


@pytest.mark.parametrize(
    ("busy", "given", "expected"), [(True, None, "passive"), (False, None, None), (True, "active", "active")]
)
def test_threads_sleep_on_a_busy_machine(monkeypatch, busy, given, expected):
    monkeypatch.setattr(module, "busy_with_others", lambda job: busy)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    module.settle_waiting_threads()
    assert os.environ.get("OMP_WAIT_POLICY") == expected
    os.environ.pop("OMP_WAIT_POLICY", None)


def test_the_ranks_of_a_node_decide_once_a_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", "7")
    asked: list[str] = []
    for launch, busy in enumerate([True, False, True]):
        monkeypatch.setattr(module, "busy_with_others", lambda job, busy=busy: asked.append(job) or busy)
        answers = []
        for rank in ("1", "0", "2"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
            module.settle_waiting_threads()
            answers.append(os.environ.pop("OMP_WAIT_POLICY", None))
        assert answers == ["passive" if busy else None] * 3 and asked == ["MASTER_PORT=7"] * (launch + 1)


def test_main_settles_them_before_torch_is_loaded():
    code = (
        "import os, runpy, sys; sys.argv = ['pretrain/main.py', '--help']\n"
        "import pretrain.runtime.environment as e; settle = e.settle_waiting_threads\n"
        "e.busy_with_others = lambda job: True\n"
        "e.settle_waiting_threads = lambda: (print('torch' in sys.modules), settle())\n"
        "try: runpy.run_path('pretrain/main.py', run_name='__main__')\n"
        "finally: print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.startswith("False\n"), result.stdout[:200] + result.stderr[-500:]
