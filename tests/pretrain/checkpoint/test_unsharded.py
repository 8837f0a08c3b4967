"""Whole tensors: read from the files of any ranks, or refused when they do not fit; weights alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.state import DataIdentity, TrainingState
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


def test_memory_is_not_held(source, monkeypatch):
    """Files are unmapped after so many bytes, and mapped again when needed."""
    monkeypatch.setattr("pretrain.checkpoint.sharded_files.RELEASE_AFTER", 1000)
    assert differences(contents(source.checkpoint), source.reference["parameters"]) == []


def edit_state(**changes):
    def edit(folder):
        state = json.loads((folder / "state.json").read_text())
        state["model"] |= changes
        (folder / "state.json").write_text(json.dumps(state))

    return edit


FILES = "weights_and_optimizer"
DAMAGED = {
    "lacks rank_00001.safetensors; it was written by 2 ranks": lambda f: (
        f / FILES / "rank_00001.safetensors"
    ).unlink(),
    "cannot read": lambda f: (f / FILES / "index.json").unlink(),
    "index.json does not hold what": lambda f: damage(f / FILES / "index.json", "truncated"),
    "the files are of another model": edit_state(d_model=90),
    "has unknown final_norm.bias": edit_state(norm_bias=False),
    "lacks layers.4.attention.k.bias": edit_state(heads=[3, 5, 9, 9, 9]),
    "holds no state.json": lambda f: (f / "state.json").unlink(),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_unreadable_checkpoints(source, tmp_path, said):
    folder = copied(source.checkpoint, tmp_path)
    DAMAGED[said](folder)
    with refused(said):
        UnshardedCheckpoint.open(folder)


# ---------------------------------------------------------------- weights alone


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

    def full(self, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pretrain.checkpoint.writer.TensorFile.write", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_weights(target, state_of(source), [(NAME, torch.zeros(3))], source.checkpoint / "tokenizer")
    assert verify(target) is None
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


NAME = "layers.1.attention.o.bias"


@pytest.mark.parametrize("shape", [Shape(1, 3), Shape(2, 2)], ids=str)
def test_a_run_continues_from_weights_alone(source, written, tmp_path, shape):
    run = shape_run(Path(source.run.data), tmp_path, source.shape, *ODD_MODEL)
    shutil.copytree(written, run.folder / "checkpoints" / written.name)
    found = run_distributed(load_and_gather, shape.ranks, run, shape, tmp_path / "again", timeout=120)[0]
    expected = source.reference["parameters"]
    assert all(
        torch.equal(found["parameters"][name]["weight"], expected[name]["weight"]) for name in expected
    )
    assert found["steps"] == {0}
