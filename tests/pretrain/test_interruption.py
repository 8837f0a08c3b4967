"""Runs that are asked to stop at any moment, and go on as if nothing had happened: real processes, real signals."""

from __future__ import annotations

import signal

import pytest

from pretrain.signals import STOPPED
from tests.launch import launch, start
from tests.pretrain.training import curve, nano_arguments

# Slow enough to be hit in the middle: validation after every second step takes longer than the steps.
SETTINGS = (
    "--steps", "10", "--validation.every", "2", "--validation.sequences", "40", "--micro_batch", "1",
    "--logging.every", "1", "--logging.seconds", "0", "--checkpoint.every", "5",
    "--checkpoint.background", "true",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(small_folder, tmp_path_factory):
    """The curve of an uninterrupted run on two ranks."""
    runs = tmp_path_factory.mktemp("whole")
    finished = launch(
        ["--ds_config", "ds_configs/zero1.json", *nano_arguments(small_folder, runs, *SETTINGS)], 2
    )
    assert finished.returncode == 0, finished.output
    return curve(runs / "nano")


def arguments_of(data, runs, *more):
    return ["--ds_config", "ds_configs/zero1.json", *nano_arguments(data, runs, *SETTINGS, *more)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rank", "code", "text"),
    [
        (signal.SIGUSR1, 1, STOPPED, "step  3/10"),
        pytest.param(signal.SIGTERM, 0, STOPPED, "step  4/10", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, None, 130, "step  6/10", marks=pytest.mark.slow),
    ],
)
def test_stopped_by_a_signal(small_folder, tmp_path, whole, number, rank, code, text):
    arguments = arguments_of(small_folder, tmp_path)
    with start(arguments, 2) as running:
        running.wait_for(text)
        running.kill(rank, number)
        finished = running.wait(60)
    assert finished.returncodes == [code, code], finished.output
    assert (
        f"stopped  ({'rank 1: ' if rank else ''}{number.name}); the same command continues" in finished.output
    )
    assert "Traceback" not in finished.output
    again = launch(arguments, 2)
    assert again.returncode == 0, again.output
    assert curve(tmp_path / "nano") == whole
