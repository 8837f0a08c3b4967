"""What a run computes in one, and how attention: no more than rounding changes, at any ZeRO stage and t."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.errors import UserError
from model.presets import preset
from pretrain.engine.compiling import decide_attention, decide_fused
from pretrain.engine.ds_config import EngineSettings
from pretrain.engine.kernels import attention_kernels, kernel_line
from tests.helpers.distributed import run_distributed
from tests.helpers.training import curve, nano_run, session

NANO = preset("prism-nano")


def test_what_auto_decides():
    assert decide_fused("auto", 2, "cuda", True) == "all"
    assert decide_fused("auto", 2, "cuda", False) == "loss", (
        "without a compiler their gradients would be copied"
    )
    assert decide_fused("auto", 3, "cuda", True) == "loss"
    assert decide_fused("auto", 2, "cpu", True) == "loss"
    assert [decide_fused(asked, 2, "cpu", False) for asked in ("all", "loss", "none")] == [
        "all",
        "loss",
        "none",
    ]
    with pytest.raises(UserError, match="fused: all is not valid at ZeRO stage 3"):
        decide_fused("all", 3, "cpu", False)


def test_a_run_goes_on_as_it_began():
    assert decide_fused("auto", 2, "cpu", False, {"fused": "all"}) == "all"
    assert decide_fused("auto", 2, "cuda", True, {"fused": "loss"}) == "loss"
    assert decide_fused("auto", 2, "cuda", True, {"steps": 3}) == "none", "it began before the setting"
    assert decide_fused("auto", 3, "cuda", True, {"fused": "all"}) == "loss"
    assert decide_fused("none", 2, "cpu", False, {"fused": "all"}) == "none", "the user decides first"


def test_how_attention_is_computed():
    auto = {
        (device, bf16): decide_attention("auto", device, bf16, 512, {})
        for device in ("cpu", "cuda") for bf16 in (False, True)
    }  # fmt: skip
    assert [key for key, found in auto.items() if found == "blocks"] == [("cpu", True)]
    assert decide_attention("auto", "cpu", True, 513, {}) == "torch"
    assert decide_attention("auto", "cpu", True, 512, {"steps": 3}) == "torch", "it began before the setting"
    assert decide_attention("auto", "cpu", False, 512, {"attention": "blocks"}) == "blocks"
    assert decide_attention("auto", "cuda", True, 512, {"attention": "blocks"}) == "torch"
    assert decide_attention("blocks", "cuda", True, 512, {"attention": "torch"}) == "blocks", (
        "the user decides first"
    )


def test_the_planner_counts_what_stage_3_cannot_fuse_as_separate(small_folder, tmp_path):
    run = replace(nano_run(small_folder, tmp_path), fused="all")
    found = {
        stage: EngineSettings.of(run, {"zero_optimization": {"stage": stage}}, False, NANO).fused
        for stage in (2, 3)
    }
    assert found == {2: "all", 3: "loss"}


@pytest.mark.parametrize(
    ("fused", "ranks", "stage", "flags"),
    [
        ("all", 2, 2, ("--tensor_parallel", "2")),
        ("loss", 2, 3, ()),
        pytest.param("all", 2, 1, ("--micro_batch", "1"), marks=pytest.mark.slow),
        pytest.param(
            "all", 2, 2, ("--tensor_parallel", "2", "--sequence_parallel", "true"), marks=pytest.mark.slow
        ),
        pytest.param("all", 1, 2, ("--document_mask", "true"), marks=pytest.mark.slow),
        pytest.param("all", 1, 2, ("--activation_checkpointing", "true"), marks=pytest.mark.slow),
    ],
)
def test_fused_training_equals_plain_training(fused, ranks, stage, flags, small_folder, tmp_path):
    changed = [("--fused", kind) for kind in ("none", fused)]
    assert_no_more_than_rounding(small_folder, tmp_path, changed, flags, ranks, stage)


@pytest.mark.parametrize(
    ("ranks", "stage", "flags"),
    [
        (2, 2, ("--tensor_parallel", "2")),  # one of a head's two ranks has the later queries
        pytest.param(1, 3, ("--activation_checkpointing", "true"), marks=pytest.mark.slow),
        pytest.param(1, 2, ("--document_mask", "true"), marks=pytest.mark.slow),
        pytest.param(1, 2, ("--compile", "true"), marks=pytest.mark.slow),
    ],
)
def test_attention_in_blocks_equals_torchs(ranks, stage, flags, small_folder, tmp_path):
    changed = [("--attention", kind) for kind in ("torch", "blocks")]
    assert_no_more_than_rounding(small_folder, tmp_path, changed, flags, ranks, stage)


def assert_no_more_than_rounding(data, runs, changed, flags, ranks, stage):
    """Two runs that differ by the flags *changed* have the same curves, but for rounding in fp32."""
    curves = []
    for kind in changed:
        run = nano_run(data, runs, *flags, "--steps", "4", "--name", kind[1], *kind)
        [(_, error), *_] = run_distributed(session, ranks, run, stage, timeout=120)
        assert error is None
        curves.append(curve(run.folder))
    assert len(curves[0]) == len(curves[1]) == 4
    for one, other in zip(*curves, strict=True):
        assert one.keys() == other.keys()
        for name, bound in (("train_loss", 2e-6), ("val_loss", 2e-6), ("grad_norm", 2e-5)):
            assert other.get(name, 0) == pytest.approx(one.get(name, 0), rel=bound), name


def test_the_kernels_of_a_cpu():
    cpu = torch.device("cpu")
    found = attention_kernels(preset("prism-124m"), cpu, torch.float32, False)
    assert kernel_line(found) == "flash (head dim 64, 96, 128, 256)"
    windowed = preset("gptneo-tiny")
    assert attention_kernels(windowed, cpu, torch.bfloat16, True) == {"flash": [16]}
    in_blocks = {"products over blocks of queries": [16]}
    assert attention_kernels(windowed, cpu, torch.bfloat16, False, "blocks") == in_blocks
    assert attention_kernels(windowed, cpu, torch.bfloat16, True, "blocks") == {"flash": [16]}, "documents"
