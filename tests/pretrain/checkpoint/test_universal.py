"""DeepSpeed's own converter reads our checkpoints, and joins the parameters to the same bits."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from tests.helpers.exports import trained
from tests.helpers.marks import slow
from tests.helpers.shapes import newest

# ranks, ZeRO stage, tensor-parallel degree, precision. In bf16 with fp32 gradients stage 1 is another
# optimizer class.
WORLDS = {
    "zero2": (2, 2, 1, "fp32"),
    "zero3": (2, 3, 1, "fp32"),
    "zero1_tensor": (2, 1, 2, "fp32"),
    "zero3_tensor": (4, 3, 2, "fp32"),
    "zero1_bf16": (2, 1, 1, "bf16"),
}
QUICK = ("zero2", "zero1_tensor", "zero3")
# Every kind of parameter: biases, norms with biases, learned positions, an untied output.
MODEL = "--model gpt2-nano --heads 3,4x3 --architecture.ffn swiglu --architecture.tie_embeddings false"
RULES = "[{name: slow, parameters: [q, k], layers: upper_half, scale: 0.25}]"


def train(small_folder: Path, root: Path, world: str) -> Path:
    """The last checkpoint of a short run of a world above."""
    ranks, stage, tensor_parallel, precision = WORLDS[world]
    flags = f"--tensor_parallel {tensor_parallel} --precision {precision} --steps 4"
    return newest(
        trained(small_folder, root, world, MODEL, flags, "--lr_rules", RULES, ranks=ranks, stage=stage).folder
    )


def assert_same_bits(universal: Path, checkpoint: UnshardedCheckpoint) -> None:
    """Compare weights, both moments and step counts with what the converter wrote."""
    common = torch.load(universal / "zero/optimizer_state.pt", weights_only=False)
    for name in checkpoint.names():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            content = torch.load(universal / "zero" / name / f"{key}.pt", weights_only=False)
            # Stage 3 without tensor parallelism leaves flat tensors, the others have a dictionary around
            # them.
            found = (content["param"] if isinstance(content, dict) else content).flatten()
            expected = checkpoint.tensor(name, key).flatten()
            if checkpoint.specs[name].vocabulary:  # without the rows that pad the vocabulary
                found, expected = found[: expected.numel()], expected[: found.numel()]
            assert torch.equal(found, expected), (name, key)
        path = universal / "zero" / name / "step.pt"
        if path.is_file():
            steps = {int(torch.load(path, weights_only=False))}
        else:
            steps = {int(state["step"]) for state in common["optimizer_state_dict"]["state"].values()}
        assert steps == {checkpoint.step(name)} == {4}
    assert {group["name"]: group["lr"] for group in common["param_groups"]} == {
        name: group.settings["lr"] for name, group in checkpoint.groups.items()
    }


@pytest.mark.parametrize("world", [*QUICK, *slow(world for world in WORLDS if world not in QUICK)])
def test_the_converter_joins_to_the_same_bits(world, small_folder, tmp_path):
    """Three heads are split over two tensor-parallel ranks."""
    from deepspeed.checkpoint.ds_to_universal import main

    step = train(small_folder, tmp_path, world)
    folders = {"input_folder": str(step / "deepspeed"), "output_folder": str(tmp_path / "universal")}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    others = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
    main(argparse.Namespace(**folders, **workers, **others))
    assert_same_bits(tmp_path / "universal", UnshardedCheckpoint.open(step))
