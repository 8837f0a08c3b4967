"""What train leaves behind in the process that calls it: nothing, however it ends and wherever it is called.

One process for the whole table: its first call also shows that the second works.
"""

import json
import os
import subprocess
import sys

import pytest

from pretrain.metrics.file import read_metrics
from tests.helpers.training import ROOT

# What happens, and how the call ends.
OUTCOMES = {
    "success": "SavedRun",
    "finished": "SavedRun",
    "bad setting": "UserError: global_batch_tokens: 500",
    "other seed": "UserError: resume:",
    "hook raises": "ValueError: boom",
    "Ctrl-C": "KeyboardInterrupt: SIGINT",
    "SIGTERM": "Stopped: SIGTERM",
    "SIGUSR1 after the last save": "Stopped: SIGUSR1",
    "stage 3, other model, deterministic, threads": "SavedRun",
    "within inference_mode and float64": "SavedRun",
    "in a thread": "SavedRun",
    "in an event loop": "SavedRun",
    "within train": "UserError: train: this process trains already",
    "own group": "SavedRun",
    "group of other ranks": "UserError: process group:",
    "recipe": "RunConfig",
    "open": "SavedRun",
    "load_model": "Transformer",
}
PROGRAM = r"""
import asyncio, gc, json, os, signal, sys, threading
import torch
import torch._dynamo  # torch's optimizers import it, which changes filters of warnings
import torch.distributed as dist
import pretrain.assembly.open_run, pretrain.report, pretrain.trainer
from pretrain import Hook, HookResult, SavedRun, recipe, train
from pretrain.utils.plotting import _figure_class
from tests.helpers.process_state import differences, process_state

data, runs = sys.argv[1:]
NANO = dict(
    model="prism-nano", data=data, runs_dir=runs, steps=4, global_batch_tokens=512, micro_batch=2,
    precision="fp32", checkpoint={"every": 2}, logging={"wandb": "disabled"}, validation={"every": 0},
)

def run(name, ds_config="zero2", hooks=(), **changes):
    return train(recipe("micro", **NANO | {"name": name} | changes), ds_config, hooks)

def hook(act):
    class Acts(Hook):
        name = "acts"
        def __init__(self, session): pass
        def is_due(self, step): return step == 2
        def run(self, engine, state, row):
            act()
            return HookResult()
    return [Acts]

def late(session):
    class Late(Hook):
        name = "late"
        def summarize(self, session):
            os.kill(os.getpid(), signal.SIGUSR1)
            return []
    return Late()

def boom(): raise ValueError("boom")

def in_thread():
    results = []
    def work():
        try: results.append(run("thread"))
        except BaseException as error: results.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException): raise results[0]
    return results.pop()

async def inside(): return run("loop")

def inference():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(): return run("inference")
    finally: torch.set_default_dtype(torch.float32)

def with_group(name, size=1):
    if size == 1: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else: dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    before = process_state()
    try: return type(run(name))(*[None] * 4)  # one that holds no checkpoint open
    finally:
        lines = differences(before, process_state())
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
        assert not lines, lines

OUTCOMES = {
    "success": lambda: run("run"),
    "finished": lambda: run("run"),
    "bad setting": lambda: run("bad", global_batch_tokens=500),
    "other seed": lambda: run("run", seed=7),
    "hook raises": lambda: run("hook", hooks=hook(boom)),
    "Ctrl-C": lambda: run("int", hooks=hook(lambda: os.kill(os.getpid(), signal.SIGINT))),
    "SIGTERM": lambda: run("term", hooks=hook(lambda: os.kill(os.getpid(), signal.SIGTERM))),
    "SIGUSR1 after the last save": lambda: run("late", hooks=[late]),
    "stage 3, other model, deterministic, threads": lambda: run(
        "other", "zero3", heads="2x4", precision="bf16", deterministic=True, threads=2, steps=2
    ),
    "within inference_mode and float64": inference,
    "in a thread": in_thread,
    "in an event loop": lambda: asyncio.run(inside()),
    "within train": lambda: run("outer", hooks=hook(lambda: run("inner"))),
    "own group": lambda: with_group("group"),
    "group of other ranks": lambda: with_group("group-2", 2),
    "recipe": lambda: recipe("124m"),
    "open": lambda: SavedRun.open(runs + "/run"),
    "load_model": lambda: SavedRun.open(runs + "/run").load_model(),
}

_figure_class()
gc.freeze()  # the libraries' objects are many, and every state is taken after a collection
torch.manual_seed(3)
found = {}
for name, act in OUTCOMES.items():
    before = process_state()
    try:
        ended = type(act()).__name__
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    found[name] = [ended, differences(before, process_state())]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_train_leaves_the_process_as_it_was(small_folder, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(small_folder), str(tmp_path)]
    # Two threads that spin while they wait would take the cores of other tests.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: ended for name, (ended, _) in found.items() if not ended.startswith(OUTCOMES[name])} == {}
    assert {name: changed for name, (_, changed) in found.items() if changed} == {}
    assert [*found] == [*OUTCOMES]
    assert not [*tmp_path.glob("hook/checkpoints/.writing*")]
    same = [read_metrics(tmp_path / name) for name in ("run", "inference", "thread", "loop", "group")]
    curves = [[row["train_loss"] for row in rows] for rows in same]
    assert len(curves[0]) == 4 and all(curve == curves[0] for curve in curves)  # bit-identical wherever
