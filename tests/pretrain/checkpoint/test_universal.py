"""DeepSpeed's own converter reads our checkpoints, and joins the parameters to the same bits."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.parameters import parameter_specs
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.engine.universal_info import universal_info
from tests.helpers.exports import trained
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
RULES = "[{name: slow, parameters: [q, k], layers: upper_half, scale: 0.25}]"


def train(small_folder: Path, root: Path, world: str) -> Path:
    """The last checkpoint of a short run of a world above."""
    ranks, stage, tensor_parallel, precision = WORLDS[world]
    flags = {"tensor_parallel": tensor_parallel, "precision": precision, "steps": 4, "lr_rules": RULES}
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return newest(trained(small_folder, root, world, *given, ranks=ranks, stage=stage).folder)


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
        states = common["optimizer_state_dict"]["state"].values() if not path.is_file() else ()
        steps = (
            {int(torch.load(path, weights_only=False))}
            if path.is_file()
            else {int(s["step"]) for s in states}
        )
        assert steps == {checkpoint.step(name)} == {4}
    assert {group["name"]: group["lr"] for group in common["param_groups"]} == {
        name: group.settings["lr"] for name, group in checkpoint.groups.items()
    }


@pytest.mark.parametrize(
    "world", [pytest.param(w, marks=[pytest.mark.slow] if w not in QUICK else []) for w in WORLDS]
)
def test_the_converter_joins_to_the_same_bits(world, small_folder, tmp_path):
    """Three heads are split over two tensor-parallel ranks."""
    from deepspeed.checkpoint.ds_to_universal import main

    step = train(small_folder, tmp_path, world)
    options = argparse.Namespace(
        input_folder=str(step / "deepspeed"),
        output_folder=str(tmp_path / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    main(options)
    assert_same_bits(tmp_path / "universal", UnshardedCheckpoint.open(step))


@pytest.mark.slow
def test_deepspeeds_command_as_the_docs_give_it(small_folder, tmp_path):
    step = train(small_folder, tmp_path, "zero1_tensor")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(step / "deepspeed"), "--output_folder", str(tmp_path / "universal")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert_same_bits(tmp_path / "universal", UnshardedCheckpoint.open(step))


def test_every_parameter_is_joined_the_way_it_is_cut():
    """By hand: which parameters are copies, which are cut along their inputs, and that a pattern is a whole
    name."""
    model = ModelConfig(
        vocab_size=300,
        context_length=16,
        d_model=24,
        heads=(2, 3),
        ffn_width=32,
        ffn="swiglu",
        norm="layernorm",
        norm_bias=True,
        attention_bias="all",
        ffn_bias=True,
        positions="learned",
        tie_embeddings=False,
    )
    specs = parameter_specs(model)
    info = universal_info(specs, model.vocab_size)

    def matched(key):
        return {
            re.sub(r"^layers\.\d+\.", "", name)
            for name in specs
            if any(re.match(pattern, name) for pattern in info[key])
        }

    copies = {"attention_norm.weight", "attention_norm.bias", "ffn_norm.weight", "ffn_norm.bias"}
    assert matched("tp_replicated_parameter_patterns") == copies | {
        "attention.o.bias",
        "ffn.down.bias",
        "final_norm.weight",
        "final_norm.bias",
        "position_embedding.weight",
    }
    assert matched("parameter_with_row_parallelism_patterns") == {"attention.o.weight", "ffn.down.weight"}
    assert matched("vocabulary_parameter_patterns") == {"token_embedding.weight", "output.weight"}
    assert info["original_vocab_size"] == 300
