"""What a run computes in one, and how attention: no more than rounding changes, at any ZeRO stage and t."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import curve, nano_run, session

SLOW = [
    ("all", 2, 2, "--tensor_parallel 2 --sequence_parallel true"),
    ("all", 1, 2, "--document_mask true"),
]
FUSED = [("all", 2, 2, "--tensor_parallel 2"), *slow([("loss", 2, 3, "--micro_batch 2"), *SLOW])]


@pytest.mark.parametrize(("fused", "ranks", "stage", "flags"), FUSED)
def test_fused_training_equals_plain_training(fused, ranks, stage, flags, small_folder, tmp_path):
    changed = [("--fused", kind) for kind in ("none", fused)]
    assert_no_more_than_rounding(small_folder, tmp_path, changed, flags, ranks, stage)


# One of a head's two ranks has the later queries.
BLOCKS = [(2, 2, "--tensor_parallel 2"), *slow([(1, 2, "--compile true")])]


@pytest.mark.parametrize(("ranks", "stage", "flags"), BLOCKS)
def test_attention_in_blocks_equals_torchs(ranks, stage, flags, small_folder, tmp_path):
    changed = [("--attention", kind) for kind in ("torch", "blocks")]
    assert_no_more_than_rounding(small_folder, tmp_path, changed, flags, ranks, stage)


def assert_no_more_than_rounding(data, runs, changed, flags, ranks, stage):
    """Two runs that differ by the flags *changed* have the same curves, but for rounding in fp32."""
    curves = []
    for kind in changed:
        run = nano_run(data, runs, flags, f"--steps 4 --name {kind[1]}", *kind)
        [(_, error), *_] = run_distributed(session, ranks, run, stage, timeout=300)
        assert error is None
        curves.append(curve(run.folder))
    assert len(curves[0]) == len(curves[1]) == 4
    for one, other in zip(*curves, strict=True):
        assert one.keys() == other.keys()
        for name, bound in (("train_loss", 2e-6), ("val_loss", 2e-6), ("grad_norm", 2e-5)):
            assert other.get(name, 0) == pytest.approx(one.get(name, 0), rel=bound), name
