"""The canonical form: read from any files, written whole or not at all, refused when it does not fit."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from pretrain.checkpoint.deepspeed_files import load_safely
from safetensors.torch import save_file

from model.errors import UserError
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.state import DataIdentity, TrainingState
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.checkpoint.weights_only import write_weights
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refused
from tests.helpers.shapes import (
    ODD_MODEL,
    Shape,
    contents,
    differences,
    load_and_gather,
    shape_run,
    train,
)


@pytest.fixture(scope="module")
def source(small_folder, tmp_path_factory):
    """A finished run of the odd model on two ranks."""
    return train(small_folder, tmp_path_factory.mktemp("source"), Shape(2, 2), *ODD_MODEL)


def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / folder.name))


# ---------------------------------------------------------------- reading


def test_groups_and_state(source):
    checkpoint = UnshardedCheckpoint.open(source.checkpoint)
    assert checkpoint.state.step == 3 and checkpoint.state.model["d_model"] == 45
    grouped = [name for group in checkpoint.groups.values() for name in group.parameters]
    assert sorted(grouped) == sorted(checkpoint.names())
    for name, group in checkpoint.groups.items():
        expected = source.reference["groups"][name]
        assert {key: group.settings[key] for key in expected} == expected
    names = list(source.reference["parameters"])
    assert checkpoint.names() == names
    assert all(tuple(checkpoint.parameter(n).shape) == checkpoint.shape(n) for n in names)


def test_before_the_first_update(source, tmp_path):
    """A checkpoint without Adam state: the moments are zero."""
    folder = copied(source.checkpoint, tmp_path)
    for path in (folder / "deepspeed").glob("*_optim_states.pt"):
        state = torch.load(path, weights_only=False)
        state["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
        torch.save(state, path)
    checkpoint = UnshardedCheckpoint.open(folder)
    moments = checkpoint.optimizer_state("layers.0.attention.q.weight")
    assert moments["step"] == 0 and not moments["exp_avg"].any() and not moments["exp_avg_sq"].any()


def test_memory_is_not_held(source, monkeypatch):
    """Files are unmapped after so many bytes, and mapped again when needed."""
    monkeypatch.setattr("pretrain.checkpoint.deepspeed_files.RELEASE_AFTER", 1000)
    assert differences(contents(source.checkpoint), source.reference["parameters"]) == []


class Danger:
    """Pickles into a call."""

    def __reduce__(self):
        return (os.system, ("echo should never run > danger",))


def test_a_file_with_other_objects_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"optimizer_state_dict": Danger()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="UnpicklingError"):
        load_safely(tmp_path / "x.pt")
    assert not (tmp_path / "danger").exists()


def edit_state(**changes):
    def edit(folder):
        state = json.loads((folder / "state.json").read_text())
        state["model"] |= changes
        (folder / "state.json").write_text(json.dumps(state))

    return edit


OF_RANK = "deepspeed/zero_pp_rank_{}_mp_rank_00_optim_states.pt"
STATES = "deepspeed/mp_rank_00_model_states.pt"
DAMAGED = {
    "lacks zero_pp_rank_1_mp_rank_00_optim_states.pt": lambda f: (f / OF_RANK.format(1)).unlink(),
    "holds neither mp_rank_00_model_states.pt nor": lambda f: (f / STATES).unlink(),
    "optim_states.pt does not hold what": lambda f: damage(f / OF_RANK.format(0), "truncated"),
    "the files are of another model": edit_state(d_model=90),
    "attention_norm.bias has shape [45]": edit_state(norm_bias=False),
    "lacks layers.4.attention.k.bias": edit_state(heads=[3, 5, 9, 9, 9]),
    "holds no state.json": lambda f: (f / "state.json").unlink(),
    "has no deepspeed or canonical folder": lambda f: shutil.rmtree(f / "deepspeed"),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_unreadable_checkpoints(source, tmp_path, said):
    folder = copied(source.checkpoint, tmp_path)
    DAMAGED[said](folder)
    with refused(said):
        UnshardedCheckpoint.open(folder)


# ---------------------------------------------------------------- the canonical folder


def state_of(source):
    """A state of its model that no engine wrote."""
    state = UnshardedCheckpoint.open(source.checkpoint).state
    return TrainingState(step=3, model=state.model, data=DataIdentity(state.data.tokenizer))


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    """Its weights, as an importer writes them."""
    checkpoint = UnshardedCheckpoint.open(source.checkpoint)
    target = tmp_path_factory.mktemp("written") / "step_000003"
    weights = ((name, checkpoint.parameter(name)) for name in checkpoint.names())
    write_weights(target, state_of(source), weights, source.checkpoint / "tokenizer")
    return target


def test_written_equals_read(source, written):
    assert verify(written) is None and (written / "tokenizer").is_dir()
    assert [path.name for path in written.parent.iterdir()] == [written.name]
    one, other = UnshardedCheckpoint.open(written), UnshardedCheckpoint.open(source.checkpoint)
    assert one.groups == {} and one.state == state_of(source)
    for name in other.names():
        assert torch.equal(one.parameter(name), other.parameter(name))
        moments = one.optimizer_state(name)
        assert moments["step"] == 0 and not moments["exp_avg"].any() and not moments["exp_avg_sq"].any()


def test_full_disk(source, written, tmp_path, monkeypatch):
    target = copied(written, tmp_path)

    def full(tensors, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pretrain.checkpoint.weights_only.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_weights(target, TrainingState(), [(NAME, torch.zeros(3))], source.checkpoint / "tokenizer")
    assert verify(target) is None
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


NAME = "layers.1.attention.o.bias"
FILE = f"canonical/{NAME}.safetensors"


def test_unreadable_canonical_folders(written, tmp_path):
    folder = copied(written, tmp_path)
    path = folder / FILE
    save_file({"fp32": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=r"its model says fp32 \[45\]"):
        UnshardedCheckpoint.open(folder).parameter(NAME)
    path.write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="does not hold what a checkpoint's file holds"):
        UnshardedCheckpoint.open(folder).parameter(NAME)
    path.unlink()
    with refused(f"lacks {NAME}"):
        UnshardedCheckpoint.open(folder)
    edit_state(heads=[3, 5, 9])(folder)
    with refused("has unknown layers.3"):
        UnshardedCheckpoint.open(folder)


@pytest.mark.parametrize("shape", [Shape(1, 3), Shape(2, 2)], ids=str)
def test_a_run_continues_from_a_canonical_folder(source, written, tmp_path, shape):
    run = shape_run(Path(source.run.data), tmp_path, source.shape, *ODD_MODEL)
    shutil.copytree(written, run.folder / "checkpoints" / written.name)
    found = run_distributed(load_and_gather, shape.ranks, run, shape, tmp_path / "again", timeout=120)[0]
    expected = source.reference["parameters"]
    assert all(
        torch.equal(found["parameters"][name]["weight"], expected[name]["weight"]) for name in expected
    )
    assert found["steps"] == {0}
