"""Checkpoints in an S3 store: a server process of its own, which fails while the run fails.

MIRROR_FAULTS=30 MIRROR_SEED=2 python -m pytest -m slow tests/scenarios/test_mirror.py -s
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from pretrain.checkpoint.manifest import verify
from pretrain.mirror.copies import CLOSE_SECONDS, restore_lost
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.launch import free_port, launch, start
from tests.helpers.training import curve, nano_arguments

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

FAULTS = int(os.environ.get("MIRROR_FAULTS", "5"))
SEED = int(os.environ.get("MIRROR_SEED", "1"))
STEPS = 12 * FAULTS + 20
URL = "s3://bucket/runs"


@pytest.fixture
def proxy(monkeypatch):
    """The way to an S3 server with an empty bucket; the environment leads there."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    made = FaultyProxy(port, SEED)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        for _ in range(200):
            with contextlib.suppress(Exception):
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
                break
            time.sleep(0.1)
        yield made
    finally:
        made.close()
        server.kill()
        server.wait()


def waits_for_steps(running, generator):
    """Until some steps are done, or the run has ended."""
    with contextlib.suppress(AssertionError):
        running.wait_for("step ", timeout=60)
    time.sleep(generator.uniform(0.2, 4))


@pytest.mark.slow
def test_a_run_survives_what_happens_to_it_and_to_the_store(small_folder, tmp_path, proxy):
    more = f"--steps {STEPS} --checkpoint.every 4 --checkpoint.keep_last 1 --checkpoint.background true"
    more += " --validation.every 9 --logging.every 1 --logging.seconds 0"
    whole = launch(nano_arguments(small_folder, tmp_path / "whole", more), timeout=600)
    assert whole.returncode == 0, whole.output
    arguments = nano_arguments(small_folder, tmp_path / "runs", more, f"--checkpoint.mirror {URL}")
    folder, generator, told = tmp_path / "runs/nano", random.Random(SEED), []
    for number in range(FAULTS):
        proxy.mode = generator.choice(["works", "works", "slow", "cuts", "refuses"])
        fault = generator.choice(["kill", "SIGTERM", "lost folder", "store"])
        if fault == "store":
            proxy.mode = generator.choice(["slow", "cuts", "refuses"])
        told.append(f"{number}: store {proxy.mode}, run {fault}")
        print(told[-1], flush=True)
        with start(arguments) as running:
            waits_for_steps(running, generator)
            if fault == "store":  # fails, and works again, under one session
                proxy.mode = "works"
                time.sleep(generator.uniform(0, 2))
            running.kill(0, signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
            running.wait(CLOSE_SECONDS)  # at its end a run copies what is left, through a slow store too
        if fault == "lost folder":
            shutil.rmtree(folder, ignore_errors=True)
            proxy.mode = "works"  # else the run refuses to begin anew, which another test shows
    proxy.mode = "works"
    last = launch(arguments, timeout=600)
    assert last.returncode == 0, (told, last.output)
    assert curve(folder) == curve(tmp_path / "whole/nano"), told
    shutil.rmtree(folder)
    assert f"step_{STEPS:06d} was fetched" in restore_lost(URL, folder)[-1]
    assert verify(folder / f"checkpoints/step_{STEPS:06d}") is None


@pytest.mark.slow
def test_a_store_that_is_away_costs_no_step_and_is_said_once(small_folder, tmp_path, proxy):
    arguments = nano_arguments(small_folder, tmp_path, f"--checkpoint.mirror {URL}", "--checkpoint.every 2")
    begun = launch([*arguments, "--steps", "2"], timeout=300)
    assert begun.returncode == 0, begun.output
    proxy.mode = "refuses"
    done = launch(arguments, timeout=300)
    assert done.returncode == 0, done.output
    assert done.output.count("cannot be written") == 1 and done.output.count("not copied to") == 1
    left = sorted(path.name for path in (tmp_path / "nano/checkpoints").iterdir())
    assert left == [f"step_{step:06d}" for step in (4, 6, 8, 10, 12)]  # of which none is copied
    shutil.rmtree(tmp_path / "nano")
    refused = launch(arguments, timeout=300)
    assert refused.returncode == 1 and "cannot be read" in refused.output, refused.output
    proxy.mode = "works"
    again = launch(arguments, timeout=300)
    assert again.returncode == 0 and "step_000002 was fetched" in again.output, again.output
    finished = launch(arguments, timeout=300)
    assert finished.returncode == 0 and "already finished" in finished.output
