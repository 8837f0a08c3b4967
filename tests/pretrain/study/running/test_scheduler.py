"""Scheduling: real processes in the place of runs. What trains for real is in
tests/scenarios/test_study.py."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.errors import UserError
from pretrain.plan.micro_batch import device_memory
from pretrain.runtime.hardware import SHARING
from pretrain.study.planning import parse_study
from pretrain.study.results import check_settings, list_unfinished, load_study, run_state
from pretrain.study.running import scheduler
from pretrain.study.running.run import run_study
from pretrain.study.running.scheduler import Scheduler, Slot, run_command_line, slots, write_study
from tests.helpers.launch import ROOT
from tests.helpers.marks import slow

STAND_IN = str(ROOT / "tests" / "helpers" / "stand_in_run.py")
TEXT = """
recipe: micro
seeds: 2
settings: {steps: 5}
baseline: uniform
variants: {uniform: {heads: 8x4}, prism: {}, descending: {heads: "8,8,4,2"}}
"""


@pytest.fixture
def study(tmp_path):
    found = parse_study(TEXT, "s", tmp_path / "s")
    write_study(found)
    return found


@pytest.fixture
def stand_in(monkeypatch):
    """Makes the runs stand-ins, with options by name; returns when which began and the slots that they
    had."""
    began = []

    def use(**options):
        def command(study, planned, slot, begun):
            began.append((planned.name, slot.index, begun))
            words = options.get(planned.name.replace("-", "_"), options.get("every", "")).split()
            return [sys.executable, STAND_IN, str(planned.folder), str(planned.run.steps), *words], {}

        monkeypatch.setattr(scheduler, "run_command_line", command)
        return began

    return use


def session(study, parallel=1):
    """How many runs are finished after a session, which have failed, and what it said."""
    stream = io.StringIO()
    failed = Scheduler(study, [Slot(index) for index in range(parallel)], stream).run()
    return len(study.runs) - len(list_unfinished(study)), failed, stream.getvalue()


def test_every_run_is_made_once_and_none_again(study, stand_in, tmp_path, monkeypatch):
    began = stand_in(prism_s1="--seconds 0.3")
    monkeypatch.setattr(scheduler, "PROGRESS_SECONDS", 0)
    finished, failed, text = session(study, parallel=2)
    assert (finished, failed) == (6, {})
    assert [name for name, *_ in began] == [planned.name for planned in study.runs]
    assert {slot for _, slot, _ in began} == {0, 1}
    assert " left; " in text and "prism-s1 at step " in text
    assert "finished prism-s1: val_loss 4.5000\n" in text
    assert session(study)[0] == 6 and len(began) == 6
    later = parse_study(f"{TEXT}status: confirmed\n", "s", study.folder)
    assert run_study(later) == 0 and load_study(study.folder).file.status == "confirmed"


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(study, stand_in, tmp_path):
    stand_in(prism_s1="--fail 3")
    finished, failed, text = session(study)
    assert finished == 5 and failed == {"prism-s1": "exit code 2: error: data: no such corpus"}
    assert run_state(study, study.runs[1])[0] == "failed"
    assert "failed   prism-s1: exit code 2" in text
    began = stand_in()
    before = len(began)
    assert session(study)[0] == 6 and [name for name, *_ in began[before:]] == ["prism-s1"]
    assert "began at step 2" in (tmp_path / "s/logs/prism-s1.log").read_text()


def when(happened, act):
    """Call *act* in a thread as soon as *happened* returns true."""

    def wait():
        deadline = time.monotonic() + 60
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [*slow([signal.SIGINT]), signal.SIGTERM])
def test_a_request_to_stop_reaches_the_runs_and_the_study_goes_on(study, stand_in, tmp_path, number):
    stand_in(every="--seconds 0.5")
    training = Scheduler(study, [Slot(0), Slot(1)], io.StringIO())
    when(lambda: (tmp_path / "s/uniform-s1/metrics.jsonl").is_file(), lambda: os.kill(os.getpid(), number))
    assert not training.run() and training.stopped == number
    states = [run_state(study, planned)[0] for planned in study.runs]
    assert states[0] == "unfinished" and set(states[2:]) == {"missing"}
    stand_in()
    assert session(study)[0] == 6
    for planned in study.runs:  # no step twice, none left out
        steps = [row["step"] for row in run_state(study, planned)[1]]
        assert steps == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_run_that_pauses_by_itself_goes_on(study, stand_in, monkeypatch):
    """Also one that has paused before the scheduler, on a busy machine, looks at it."""
    popen = subprocess.Popen

    def started_and_ended(*arguments, **options):
        process = popen(*arguments, **options)
        process.wait()
        return process

    monkeypatch.setattr(scheduler.subprocess, "Popen", started_and_ended)
    began = stand_in(every="--pause 2")
    assert session(study)[0] == 6 and [name for name, *_ in began].count("prism-s1") == 3


def test_a_machine_is_shared():
    assert [slot.threads for slot in slots(2, [], 8)] == [4, 4]
    assert slots(1, [], 8)[0].threads is None
    assert [slot.devices for slot in slots(2, ["0", "1", "2", "3"], 8)] == [["0", "1"], ["2", "3"]]
    with pytest.raises(UserError, match="parallel: 33 runs at a time on 2 cores; give at most 32"):
        slots(33, [], 2)
    with pytest.raises(UserError, match="parallel: 17 runs at a time on 1 GPU; give at most 16"):
        slots(17, ["0"], 16)
    assert slots(2, ["GPU-a", "GPU-b"], 16)[1].devices == ["GPU-b"]


def test_runs_that_share_a_device_have_a_share_of_its_memory(study, monkeypatch):
    shared = slots(16, ["0"], 8)
    assert [(slot.devices, slot.sharing) for slot in shared] == [(["0"], 16)] * 16
    assert [slot.devices for slot in slots(3, ["0", "1"], 8)] == [["0"], ["1"], ["0"]]
    assert {slot.sharing for slot in slots(3, ["0", "1"], 8)} == {2}
    assert [(slot.threads, slot.sharing) for slot in slots(4, [], 2)] == [(1, 4)] * 4
    _, environment = run_command_line(study, study.runs[0], shared[3], False)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0", SHARING: "16"}
    whole, gpu = device_memory(torch.device("cpu")), SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setenv(SHARING, "16")
    assert device_memory(torch.device("cuda")) == 5 << 30
    assert device_memory(torch.device("cpu")) == whole // 16
    monkeypatch.setenv(SHARING, "none")
    with pytest.raises(UserError, match="RUNS_PER_DEVICE: 'none' is not valid"):
        device_memory(torch.device("cpu"))


def test_commands(study, tmp_path):
    def command(slot, begun=False):
        return run_command_line(study, study.runs[0], slot, begun)

    alone, environment = command(Slot(0, threads=4))
    assert alone[0] == sys.executable and alone[-2:] == ["--threads", "4"] and not environment
    assert Path(alone[alone.index("--config") + 1]) == tmp_path / "s/configs/uniform-s1.yaml"
    assert "--threads" not in command(Slot(0, threads=4), begun=True)[0]  # its numbers depend on them
    several, environment = command(Slot(1, devices=["2", "3"]))
    assert Path(several[0]).name == "deepspeed" and environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert "--num_accelerators" not in several
    assert "--master_port" not in several  # its ranks take one of their launcher's own


@pytest.mark.parametrize(
    ("settings", "devices", "ranks"),
    [
        ("global_batch_tokens: 512", 8, 2),  # two sequences
        ("global_batch_tokens: 1536", 4, 3),
        ("global_batch_tokens: 1536, tensor_parallel: 2", 7, 6),
        ("global_batch_tokens: 512, micro_batch: 2", 8, 1),
        ("global_batch_tokens: 512, tensor_parallel: 2", 1, 2),
    ],
)
def test_a_run_has_the_ranks_that_its_batch_allows(tmp_path, settings, devices, ranks):
    study = parse_study(TEXT.replace("steps: 5", f"steps: 5, {settings}"), "s", tmp_path)
    names = [str(10 + device) for device in range(devices)]
    command, environment = run_command_line(study, study.runs[0], Slot(0, devices=names), False)
    assert (Path(command[0]).name == "deepspeed") == (ranks > 1) and "--num_accelerators" not in command
    assert environment == {"CUDA_VISIBLE_DEVICES": ",".join(names[:ranks])}
    if "tensor_parallel: 2" in settings:  # ranks without GPUs are given by number
        command, environment = run_command_line(study, study.runs[0], Slot(0, threads=4), False)
        assert command[command.index("--num_accelerators") + 1] == "2" and not environment
        assert command[command.index("--threads") + 1] == "2"


LAUNCHED = """
import base64, json, sys
import deepspeed.launcher.runner as runner
from deepspeed.accelerator import get_accelerator

class Started:
    returncode = 0
    def __init__(self, command, env):
        [world] = [word.split("=", 1)[1] for word in command if word.startswith("--world_info=")]
        print("world", json.loads(base64.urlsafe_b64decode(world)))
    def wait(self):
        pass

get_accelerator().device_count = lambda: 4
runner.subprocess.Popen = Started
runner.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_launcher_takes_the_gpus_of_the_share(study, tmp_path):
    """DeepSpeed's own runner, with four GPUs that are not there."""
    command, environment = run_command_line(study, study.runs[0], Slot(1, devices=["2", "3"]), False)
    ran = subprocess.run(
        [sys.executable, "-c", LAUNCHED, *command[1:]],
        env={**os.environ, **environment, "DS_ACCELERATOR": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "world {'localhost': [2, 3]}" in ran.stdout, ran.stderr


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(60)
"""
RANK = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], "begun").touch()
while not pathlib.Path(sys.argv[1], "stop").exists():
    time.sleep(0.05)
time.sleep(1)
pathlib.Path(sys.argv[1], "saved").touch()
"""


def test_a_session_ends_when_the_ranks_have_saved(study, monkeypatch, tmp_path):
    """DeepSpeed's launcher dies of SIGTERM, and its ranks notice that and save."""
    command = [sys.executable, "-c", LAUNCHER, RANK, str(tmp_path)]
    monkeypatch.setattr(scheduler, "run_command_line", lambda *given: (command, {}))

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "stop").touch()

    when((tmp_path / "begun").exists, stop)
    finished, failed, _ = session(study)
    assert (tmp_path / "saved").exists() and finished == 0 and not failed


def test_a_run_of_other_settings_is_not_taken_for_this_studys(study, stand_in, tmp_path):
    folder = tmp_path / "s"
    (folder / "prism-s1").mkdir()
    made = parse_study(TEXT.replace("steps: 5", "steps: 9, threads: 3, compile: true"), "s", folder)
    (folder / "prism-s1/config.yaml").write_text(made.runs[1].run.to_yaml())
    with pytest.raises(UserError, match=r"made with steps 9 \(now 5\); give the folder "):
        check_settings(study)


def test_the_study_waits_for_no_run_that_was_killed(study, stand_in, tmp_path):
    stand_in(every="--seconds 30")
    training = Scheduler(study, [Slot(0)], io.StringIO())

    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    log = tmp_path / "s/logs/uniform-s1.log"
    when(lambda: log.is_file() and "began" in log.read_text(), twice)
    began = time.monotonic()
    training.run()
    assert len(list_unfinished(study)) == 6
    assert time.monotonic() - began < 25  # one step takes 30 s
