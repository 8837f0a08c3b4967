"""What DeepSpeed's own converter makes of our checkpoints is read as the checkpoint itself, to the bit."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import parameter_specs
from pretrain import convert
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.engine.universal_info import universal_info
from pretrain.run.saved import SavedRun
from tests.helpers.distributed import run_distributed
from tests.helpers.exports import failure, trained
from tests.helpers.shapes import contents, differences, newest
from tests.helpers.training import curve, nano_run, session

# ranks, ZeRO stage, tensor-parallel degree, precision. In bf16 with fp32 gradients stage 1 is another optimizer class.
WORLDS = {
    "zero2": (2, 2, 1, "fp32"),
    "zero3": (2, 3, 1, "fp32"),
    "zero1_tensor": (2, 1, 2, "fp32"),
    "zero3_tensor": (4, 3, 2, "fp32"),
    "zero1_bf16": (2, 1, 1, "bf16"),
}


RULES = "[{name: slow, parameters: [q, k], layers: upper_half, scale: 0.25}]"


@pytest.fixture(scope="module")
def run_of(small_folder, tmp_path_factory):
    """A finished run of a world above, trained when first asked for, whose newest checkpoint has universal/ too."""
    root = tmp_path_factory.mktemp("runs")

    def folder(name):
        if not (root / name).is_dir():
            ranks, stage, tensor_parallel, precision = WORLDS[name]
            run = trained(
                small_folder, root, name, "--tensor_parallel", str(tensor_parallel), "--precision", precision,
                "--steps", "4", "--lr_rules", RULES, ranks=ranks, stage=stage,
            )  # fmt: skip
            convert_by_deepspeed(newest(run.folder))
        return root / name

    return folder


def convert_by_deepspeed(checkpoint: Path) -> None:
    """DeepSpeed's converter, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(checkpoint / "deepspeed"), output_folder=str(checkpoint / "universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=False,
        )
    )  # fmt: skip


def universal_only(run: Path, target: Path) -> Path:
    """A copy of the run in which the newest checkpoint holds universal/ in place of deepspeed/."""
    copy = shutil.copytree(run, target)
    shutil.rmtree(newest(copy) / "deepspeed")
    return copy


@pytest.mark.parametrize(
    "world", ["zero2", "zero1_tensor", *(pytest.param(w, marks=pytest.mark.slow) for w in WORLDS if w not in
    ("zero2", "zero1_tensor", "zero3")), "zero3"],
)  # fmt: skip
def test_the_same_bits_as_the_checkpoint(world, run_of, tmp_path):
    """Weights, both moments, step counts and groups; three heads are split over two tensor-parallel ranks."""
    run = run_of(world)
    copy = universal_only(run, tmp_path / world)
    assert differences(contents(newest(run)), contents(newest(copy))) == []
    first, second = UnshardedCheckpoint.open(newest(run)), UnshardedCheckpoint.open(newest(copy))
    assert first.groups == second.groups and set(first.groups) == {
        "base/decay",
        "base/no_decay",
        "slow/decay",
    }
    rates = {name: group.settings["lr"] for name, group in second.groups.items()}
    assert rates["slow/decay"] == rates["base/decay"] / 4
    assert {second.step(name) for name in second.names()} == {4}


def test_the_commands_read_it(run_of, tmp_path, capsys):
    copy = universal_only(run_of("zero1_tensor"), tmp_path / "run")
    for run, out in ((run_of("zero1_tensor"), "a"), (copy, "b")):
        assert convert.main([str(run), "--out", str(tmp_path / out)]) == 0
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in "ab"]
    assert weights[0] == weights[1]


def test_a_run_continues_from_it(small_folder, run_of, tmp_path):
    """The same world goes on with the same bits as from the checkpoint that DeepSpeed's converter read."""
    curves = []
    for name in ("plain", "universal"):
        source = run_of("zero2")
        folder = shutil.copytree(source, tmp_path / name)
        if name == "universal":
            shutil.rmtree(newest(folder) / "deepspeed")
        run = nano_run(small_folder, tmp_path, "--name", name, "--steps", "7")
        [(notes, error), _] = run_distributed(session, 2, run, 2, timeout=120)
        assert error is None and not any("damaged" in note for note in notes)
        curves.append(curve(folder))
    assert curves[0] == curves[1] and curves[0][-1]["step"] == 7


@pytest.mark.slow
def test_deepspeeds_command_as_the_docs_give_it(run_of, tmp_path):
    copy = shutil.copytree(run_of("zero1_tensor"), tmp_path / "run")
    step = newest(copy)
    expected = contents(step)
    shutil.rmtree(step / "universal")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(step / "deepspeed"), "--output_folder", str(step / "universal")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    shutil.rmtree(step / "deepspeed")
    assert differences(expected, contents(step)) == []


def damage(step: Path, how: str, tmp_path: Path) -> None:
    query = step / "universal/zero/layers.1.attention.q.weight"
    if how == "parameter":
        shutil.rmtree(query)
    elif how == "moment":
        (query / "exp_avg.pt").unlink()
    elif how == "groups":
        (step / "universal/zero/optimizer_state.pt").unlink()
    elif how == "unfinished":
        shutil.rmtree(step / "universal/zero")
    elif how == "shape":
        torch.save({"param": torch.zeros(3, 3)}, query / "fp32.pt")
    elif how == "dtype":
        torch.save({"param": torch.zeros(3, 3).bfloat16()}, query / "fp32.pt")
    elif how == "cut":
        (query / "fp32.pt").write_bytes((query / "fp32.pt").read_bytes()[:200])
    else:

        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "pwned"), "w"))

        torch.save({"param": Evil()}, query / "fp32.pt")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("parameter", "does not fit the model it describes: lacks layers.1.attention.q.weight"),
        ("moment", "exp_avg.pt is missing"),
        ("groups", "optimizer_state.pt is missing"),
        ("unfinished", "holds no zero/"),
        ("shape", "fp32 of layers.1.attention.q.weight has shape [3, 3]"),
        ("dtype", "holds torch.bfloat16, not an fp32 tensor"),
        ("cut", "fp32.pt cannot be read"),
        ("evil", "holds objects that are not read"),
    ],
)
def test_what_is_missing_or_strange_is_refused_in_one_line(how, words, run_of, tmp_path, capsys):
    copy = universal_only(run_of("zero2"), tmp_path / "run")
    damage(newest(copy), how, tmp_path)
    assert words in failure(capsys, copy, "--out", tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "pwned").exists()


def test_a_universal_folder_alone_is_no_run(run_of, tmp_path, capsys):
    folder = newest(run_of("zero2")) / "universal"
    line = failure(capsys, folder, "--out", tmp_path / "hf")
    assert "what DeepSpeed's ds_to_universal wrote" in line and "step_XXXXXX/universal" in line


def test_files_beside_deepspeed_are_still_checked(run_of, tmp_path):
    """Only the files that universal/ replaces may be gone."""
    copy = universal_only(run_of("zero2"), tmp_path / "run")
    (newest(copy) / "state.json").write_text((newest(copy) / "state.json").read_text() + " ")
    with pytest.raises(UserError, match="is damaged"):
        SavedRun.open(copy, 4)


def test_every_parameter_is_joined_the_way_it_is_cut():
    """By hand: which parameters are copies, which are cut along their inputs, and that a pattern is a whole name."""
    model = ModelConfig.from_json(
        {"vocab_size": 300, "context_length": 16, "d_model": 24, "heads": [2, 3], "ffn_width": 32, "ffn": "swiglu",
         "norm": "layernorm", "norm_bias": True, "attention_bias": "all", "ffn_bias": True, "positions": "learned",
         "tie_embeddings": False}
    )  # fmt: skip
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
        "attention.o.bias", "ffn.down.bias", "final_norm.weight", "final_norm.bias", "position_embedding.weight",
    }  # fmt: skip
    assert matched("parameter_with_row_parallelism_patterns") == {"attention.o.weight", "ffn.down.weight"}
    assert matched("vocabulary_parameter_patterns") == {"token_embedding.weight", "output.weight"}
    assert info["original_vocab_size"] == 300
