"""Runs that are asked to stop at any moment, and go on as if nothing had happened: real processes, real
signals."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time

import psutil
import pytest

from pretrain.runtime.signals import STOPPED
from tests.helpers.launch import launch, start
from tests.helpers.training import curve, nano_arguments

# Slow enough to be hit in the middle: validation after every second step takes longer than the steps.
SETTINGS = (
    "--ds_config ds_configs/zero1.json --steps 10 --validation.every 2 --micro_batch 1",
    "--validation.sequences 40 --logging.every 1 --logging.seconds 0 --checkpoint.every 5 "
    "--checkpoint.background true",
)


@pytest.fixture(scope="module")
def whole(small_folder, tmp_path_factory):
    """The curve of an uninterrupted run on two ranks."""
    runs = tmp_path_factory.mktemp("whole")
    finished = launch(arguments_of(small_folder, runs), 2)
    assert finished.returncode == 0, finished.output
    return curve(runs / "nano")


def arguments_of(data, runs, *more):
    return nano_arguments(data, runs, *SETTINGS, *more)


def disappear(folder):
    """At once: removing file by file fails when the run writes one in between."""
    gone = folder.with_name("gone")
    folder.rename(gone)
    shutil.rmtree(gone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rank", "code", "text"),
    [
        (signal.SIGUSR1, 1, STOPPED, "step  3/10"),
        (signal.SIGTERM, 0, STOPPED, "step  4/10"),
        (signal.SIGINT, None, 130, "step  6/10"),
    ],
)
def test_stopped_by_a_signal(small_folder, tmp_path, whole, number, rank, code, text):
    arguments = arguments_of(small_folder, tmp_path)
    with start(arguments, 2) as running:
        running.wait_for(text)
        running.kill(rank, number)
        finished = running.wait(60)
    assert finished.returncodes == [code, code], finished.output
    saved = curve(tmp_path / "nano")[-1]["step"]
    told = f"({'rank 1: ' if rank else ''}{number.name}); step {saved} is saved; the same command continues"
    assert f"stopped  {told}" in finished.output
    assert "Traceback" not in finished.output
    again = launch(arguments, 2)
    assert again.returncode == 0, again.output
    assert curve(tmp_path / "nano") == whole


def wait_for_compiler(rank: int) -> list[psutil.Process]:
    """The processes below a rank, as soon as a compiler is one of them."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        below = psutil.Process(rank).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(process.name() == "cc1plus" for process in below):
                return below
        time.sleep(0.02)
    raise AssertionError("no compiler")


@pytest.mark.slow
def test_stopped_while_compiling(small_folder, tmp_path):
    """The first step compiles; it is finished, and saved, and perhaps one more."""
    settings = "--compile true --heads 2x4 --steps 4 --interruption.agreement_seconds 290"
    arguments = arguments_of(small_folder, tmp_path, settings)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    with start(arguments, 1, env=cache) as running:
        running.wait_for("steps    ")
        for process in wait_for_compiler(running.processes[0].pid):  # SLURM warns every process of a step
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        running.kill(0, signal.SIGUSR1)
        assert "step 1/4" not in running.output()
        finished = running.wait(290)
    assert finished.returncodes == [STOPPED], finished.output
    assert [row["step"] for row in curve(tmp_path / "nano")] in ([1], [1, 2])
    again = launch(arguments, 1, env=cache)
    assert again.returncode == 0 and "resume   from" in again.output, again.output
    assert [row["step"] for row in curve(tmp_path / "nano")] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("background", ["true", "false"])
def test_checkpoints_that_disappear(small_folder, tmp_path, whole, background):
    """Later saves make the folder again; one that was under way ends the run with a line, and the next life
    goes on."""
    settings = f"--checkpoint.background {background} --checkpoint.every 3"
    arguments = arguments_of(small_folder, tmp_path, settings)
    with start(arguments, 2) as running:
        running.wait_for("step  4/10")
        disappear(tmp_path / "nano" / "checkpoints")
        finished = running.wait(60)
    assert finished.returncode in (0, 2) and "Traceback" not in finished.output, finished.output
    if finished.returncode == 2:
        assert finished.output.count("error: checkpoint: cannot write ") == 1
        finished = launch(arguments, 2)
    assert finished.returncode == 0, finished.output
    assert curve(tmp_path / "nano") == whole
    assert (tmp_path / "nano" / "checkpoints" / "step_000010").is_dir()


@pytest.mark.slow
def test_a_run_folder_that_disappears(small_folder, tmp_path, whole):
    arguments = arguments_of(small_folder, tmp_path)
    with start(arguments, 2) as running:
        running.wait_for("step  6/10")
        disappear(tmp_path / "nano")
        finished = running.wait(60)
    assert finished.returncodes == [2, 2] and "Traceback" not in finished.output, finished.output
    assert finished.output.count("error: checkpoint: cannot write ") == 1
    again = launch(arguments, 2)
    assert again.returncode == 0, again.output
    assert curve(tmp_path / "nano") == whole
