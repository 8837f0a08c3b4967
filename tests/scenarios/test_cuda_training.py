"""The whole program on GPUs: the numbers of the CPU, NCCL between ranks, bit-identical continuation."""

from __future__ import annotations

import pytest

from tests.helpers.gpus import needs_gpus
from tests.helpers.launch import launch
from tests.helpers.training import curve, nano_arguments

CONSTANT = "--schedule.kind wsd --schedule.warmup 2 --schedule.decay 0"


def train(data, runs, name, *more, world=1, stage=2):
    settings = f"--name {name} --ds_config ds_configs/zero{stage}.json"
    finished = launch(nano_arguments(data, runs, settings, *more), world)
    assert finished.returncode == 0, finished.output
    return curve(runs / name)


@pytest.mark.parametrize("stage", [1, 2, 3])
@needs_gpus(1)
def test_same_curve_as_on_the_cpu(small_folder, tmp_path, monkeypatch, stage):
    found = train(small_folder, tmp_path, "gpu", stage=stage)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for one, other in zip(found, train(small_folder, tmp_path, "cpu", stage=stage), strict=True):
        # fp32 on both, other kernels: 12 steps of Adam make the last digits of the first step larger.
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@needs_gpus(1)
def test_continued_in_two_sessions(small_folder, tmp_path, stage, precision):
    """--deterministic: stopped after 6 steps and continued, the curve is that of one session to the bit."""
    common = ("--deterministic true --validation.every 0", f"--precision {precision}", CONSTANT)
    whole = train(small_folder, tmp_path, "whole", *common, stage=stage)
    train(small_folder, tmp_path, "halves", *common, "--steps 6", stage=stage)
    assert train(small_folder, tmp_path, "halves", *common, stage=stage) == whole


@pytest.mark.parametrize(("compiled", "stage"), [("false", 2), ("true", 2), ("false", 3)])
@needs_gpus(1)
def test_heads_that_grow(small_folder, tmp_path, compiled, stage):
    """Checks after 4 and 8 steps; the run is stopped between them, and goes on to the bit."""
    growth = "--growth.criterion incrt --growth.interval 4 --growth.calibration 1 --growth.until 11"
    common = ("--deterministic true --validation.every 0", f"--compile {compiled}", CONSTANT, growth)
    whole = train(small_folder, tmp_path, "whole", *common, stage=stage)
    assert [row["growth/heads/layer_0"] for row in whole if "growth/heads/layer_0" in row] == [2, 2]
    train(small_folder, tmp_path, "halves", *common, "--steps 6", stage=stage)
    assert train(small_folder, tmp_path, "halves", *common, stage=stage) == whole


@pytest.mark.parametrize(
    ("tensor_parallel", "world", "stage"),
    [
        pytest.param(1, 2, 3, marks=needs_gpus(2)),
        pytest.param(2, 2, 1, marks=needs_gpus(2)),
        pytest.param(2, 4, 2, marks=needs_gpus(4)),
        pytest.param(4, 4, 3, marks=needs_gpus(4)),
    ],
)
def test_ranks_on_nccl_give_the_curve_of_one(small_folder, tmp_path, tensor_parallel, world, stage):
    alone = train(small_folder, tmp_path, "alone")
    degree = f"--tensor_parallel {tensor_parallel}"
    ranks = train(small_folder, tmp_path, "ranks", degree, world=world, stage=stage)
    for one, other in zip(alone, ranks, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
