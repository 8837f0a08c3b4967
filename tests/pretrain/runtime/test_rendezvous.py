"""Devices are settled among the ranks before anything waits for anybody."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from model.errors import UserError
from pretrain.runtime.hardware import detect_device
from pretrain.runtime.rendezvous import devices_problem
from tests.helpers.launch import ROOT, start
from tests.helpers.marks import slow
from tests.helpers.training import nano_arguments

BROKEN_GPU = """
import json, os, sys
sys.path.insert(0, {root!r})
import torch
from pretrain.runtime import rendezvous
if os.environ["RANK"] == "0":  # which has a GPU, as far as the others can tell
    here = {{"host": "n1", "kind": "cuda", "device": "GPU-1", "problem": ""}}
    rendezvous._own_device = lambda: (torch.device("cuda", 0), here)
from pretrain.runtime.exit import end_after
from datetime import timedelta
rank = int(os.environ["RANK"])
try:
    rendezvous.meet(rank, 2, timedelta(seconds=60))
except Exception as error:
    end_after(error, rank, wait=0.0)
"""


def make_entry(kind, device="", host="n1", problem=""):
    return {"host": host, "kind": kind, "device": device, "problem": problem}


def visible(monkeypatch, count, local_rank):
    """As if this process saw *count* GPUs."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(local_rank))
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(name, "8")


@pytest.mark.parametrize(
    ("count", "local_rank", "device"), [(8, 3, "cuda:3"), (1, 3, "cuda:0"), (0, 3, "cpu")]
)
def test_a_rank_takes_the_gpu_of_its_place_or_the_only_one(monkeypatch, count, local_rank, device):
    visible(monkeypatch, count, local_rank)
    assert str(detect_device()) == device
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert str(detect_device()) == "cpu"


def test_more_ranks_than_gpus(monkeypatch):
    visible(monkeypatch, 4, 5)
    said = r"^LOCAL_RANK: 5 is not valid with 4 visible GPUs; start 4 ranks on a node"
    with pytest.raises(UserError, match=said):
        detect_device()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([make_entry("cpu"), make_entry("cpu")], None),
        ([make_entry("cuda", "a"), make_entry("cuda", "b"), make_entry("cuda", "a", "n2")], None),
        (
            [make_entry("cuda", "a"), make_entry("cuda", "b"), make_entry("cuda", "a")],
            "device: ranks 0 and 2 on n1 have the same GPU",
        ),
        (
            [make_entry("cuda", "a"), make_entry("cpu", host="n2")],
            "device: rank 1 on n2 finds no GPU, though others do",
        ),
        ([make_entry("cpu"), make_entry("cuda", "a")], "device: rank 0 on n1 finds no GPU"),
        (
            [make_entry("cuda", "a"), make_entry("cpu", host="n2", problem="LOCAL_RANK: 5")],
            "rank 1 on n2: LOCAL_RANK: 5",
        ),
        ([make_entry("cpu", problem="LOCAL_RANK: 5"), make_entry("cuda", "a")], "LOCAL_RANK: 5"),
    ],
)
def test_devices_that_do_not_go_together(answers, said):
    problem = devices_problem(answers)
    assert problem is None if said is None else problem is not None and problem.startswith(said)


def test_a_rank_without_its_gpu_ends_all_of_them_at_once(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(BROKEN_GPU.format(root=str(ROOT)))
    with start([], 2, script=script, env_of={0: {"LOCAL_RANK": "0"}}, forked=True) as running:
        finished = running.wait(timeout=60)
    assert finished.returncodes == [2, 2]
    assert "error: device: rank 1 on " in finished.outputs[0] and "finds no GPU" in finished.outputs[0]
    assert finished.output.count("error:") == 1 and "Traceback" not in finished.output


ALONE = BROKEN_GPU.replace("rank = int", "rendezvous.MEETING = timedelta(seconds=1)\nrank = int")
ALONE = ALONE.replace(
    "import torch\n",
    "import pretrain.runtime.command\npretrain.runtime.command.prepare_process()\nimport torch\n",
)
ALONE = ALONE.replace('== "0"', '== "none"')


@pytest.mark.parametrize("rank", slow(["0", "1"]))
def test_ranks_that_do_not_meet_are_one_line(tmp_path, rank):
    """No other rank comes to rank 0; nothing answers rank 1."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE.format(root=str(ROOT)))
    with start([], 1, script=script, env={"RANK": rank}, env_of={0: {"RANK": rank}}) as running:
        finished = running.wait(timeout=60)
    assert finished.returncode == 1 and finished.output.count("\n") == 1, finished.output
    said = r"MASTER_ADDR: the 2 ranks did not meet at 127\.0\.0\.1 port \d+ within 1 s \("
    assert re.search(said, finished.output), finished.output


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number", "code"), [("0", signal.SIGINT, 130), ("1", signal.SIGUSR1, 75)])
def test_a_rank_that_waits_for_the_others_can_be_stopped(small_folder, tmp_path, rank, number, code):
    arguments = nano_arguments(small_folder, tmp_path)
    with start(arguments, 1, env_of={0: {"RANK": rank, "WORLD_SIZE": "2"}}) as running:
        running.wait_for(f"waiting  rank {rank}")
        running.kill(0, number)
        finished = running.wait(20)
    assert finished.returncode == code, finished.output
    assert "Traceback" not in finished.output


LAUNCHER = """
import os, subprocess, sys
code = "from pretrain.runtime.environment import *; print(rendezvous_port(read_environment()), flush=True)"
for rank in "01":
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"RANK": rank, "LOCAL_RANK": rank})
"""


def test_each_launcher_has_a_port_of_its_own_unless_one_is_asked_for(tmp_path):
    """As the deepspeed command sets the variables: two runs of two ranks on one machine."""
    script = tmp_path / "deepspeed"
    script.write_text(LAUNCHER)
    environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "PYTHONPATH": str(ROOT)}

    def ports(port):
        variables = environment | {"MASTER_PORT": port}
        done = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True)
        return done.stdout.split()

    first, second = ports("29500"), ports("29500")
    assert len(first) == 2 and len({*first}) == len({*second}) == 1 and first != second
    assert all(20_000 <= int(port) < 29_000 for port in first + second)
    assert ports("23456") == ["23456"] * 2
