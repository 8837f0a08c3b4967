"""The canonical form: read from any files, written whole or not at all, refused when it does not fit."""

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import parameter_specs
from pretrain.checkpoint.deepspeed_files import load_safely
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.state import TrainingState
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.checkpoint.unsharded_folder import UnshardedParameter, write_unsharded
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refused
from tests.helpers.shapes import (
    ODD_MODEL,
    Shape,
    contents,
    differences,
    load_and_gather,
    newest,
    save_unsharded,
    shape_run,
    train,
)


@pytest.fixture(scope="module")
def source(small_folder, tmp_path_factory):
    """A finished run of the odd model on two ranks."""
    return train(small_folder, tmp_path_factory.mktemp("source"), Shape(2, 2), *ODD_MODEL)


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    """Its checkpoint in canonical form."""
    target = tmp_path_factory.mktemp("written") / "step_000003.canonical"
    return save_unsharded(UnshardedCheckpoint.open(source.checkpoint), target)


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
    with pytest.raises(UserError, match="holds objects that are not read"):
        load_safely(tmp_path / "x.pt")
    assert not (tmp_path / "danger").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "x.pt", weights_only=True)


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
    "cannot be read": lambda f: damage(f / OF_RANK.format(0), "truncated"),
    "the files are of another model": edit_state(d_model=90),
    "does not fit the model it describes: has unknown": edit_state(norm_bias=False),
    "lacks layers.4.attention.k.bias and 17 more": edit_state(heads=[3, 5, 9, 9, 9]),
    "holds no state.json": lambda f: (f / "state.json").unlink(),
    "has no deepspeed or canonical folder": lambda f: shutil.rmtree(f / "deepspeed"),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_unreadable_checkpoints(source, tmp_path, said):
    folder = copied(source.checkpoint, tmp_path)
    DAMAGED[said](folder)
    assert_refused(folder, said)


def assert_refused(folder, said):
    with refused(said):
        UnshardedCheckpoint.open(folder)


# ---------------------------------------------------------------- the canonical folder


def test_written_equals_read(source, written):
    assert verify(written) is None
    assert differences(contents(written), contents(source.checkpoint)) == []
    one, other = UnshardedCheckpoint.open(written), UnshardedCheckpoint.open(source.checkpoint)
    assert one.groups == other.groups and asdict(one.state) == asdict(other.state)
    assert [one.step(name) for name in one.names()] == [3] * len(one.names())
    assert (written / "tokenizer").is_dir()
    assert sorted(path.name for path in written.parent.iterdir()) == [written.name]


def test_full_disk(source, written, tmp_path, monkeypatch):
    target = copied(written, tmp_path)

    def full(tensors, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pretrain.checkpoint.unsharded_folder.save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        save_unsharded(UnshardedCheckpoint.open(source.checkpoint), target)
    assert verify(target) is None
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def small_model():
    return ModelConfig(vocab_size=7, context_length=8, d_model=8, heads=(2, 4), ffn_width=8)


def parameters(specs):
    return [UnshardedParameter(name, torch.randn(spec.shape)) for name, spec in specs.items()]


def norm(size, dtype=torch.float32):
    return UnshardedParameter("final_norm.weight", torch.zeros(size, dtype=dtype))


UNFIT = {
    "1 parameters were not given, final_norm.weight first": lambda given: given.pop(),
    "x is not a parameter": lambda given: given.append(UnshardedParameter("x", torch.zeros(1))),
    r"\[9\]": lambda given: given.insert(0, norm(9)),
    "torch.bfloat16": lambda given: given.insert(0, norm(8, torch.bfloat16)),
}


@pytest.mark.parametrize("said", UNFIT)
def test_what_does_not_fit_is_not_written(source, tmp_path, said):
    given = parameters(parameter_specs(small_model()))
    UNFIT[said](given)
    state = TrainingState(model=small_model().to_json())
    with pytest.raises(UserError, match=said):
        write_unsharded(tmp_path / "step_000000", state, [], given, source.checkpoint / "tokenizer")
    assert list(tmp_path.iterdir()) == []


def test_weights_alone(source, tmp_path):
    """What an importer writes: no moments, no groups."""
    specs = parameter_specs(small_model())
    given = parameters(specs)
    state = TrainingState(model=small_model().to_json())
    folder = write_unsharded(tmp_path / "step_000000", state, [], given, source.checkpoint / "tokenizer")
    checkpoint = UnshardedCheckpoint.open(folder)
    for parameter in given:
        assert torch.equal(checkpoint.parameter(parameter.name), parameter.weight)
        moments = checkpoint.optimizer_state(parameter.name)
        assert moments["step"] == 0 and not moments["exp_avg"].any() and not moments["exp_avg_sq"].any()
    assert checkpoint.groups == {}


def damage_index(folder, change):
    path = folder / "canonical" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


NAME = "layers.1.attention.o.bias"


FILE, INDEX = f"canonical/{NAME}.safetensors", "canonical/index.json"
UNREADABLE = {
    f"lacks {NAME}": lambda f: damage_index(f, lambda i: i["parameters"].pop(NAME)),
    f"which holds {NAME}, is missing": lambda f: (f / FILE).unlink(),
    "format: 9 is not valid": lambda f: damage_index(f, lambda i: i.update(format=9)),
    "inside the folder": lambda f: damage_index(f, lambda i: i["parameters"][NAME].update(file="../../x")),
    "is not valid JSON": lambda f: (f / INDEX).write_text("{"),
    "has unknown layers.3": edit_state(heads=[3, 5, 9]),
}


@pytest.mark.parametrize("said", UNREADABLE)
def test_unreadable_canonical_folders(written, tmp_path, said):
    folder = copied(written, tmp_path)
    UNREADABLE[said](folder)
    assert_refused(folder, said)


def test_unreadable_tensors(written, tmp_path):
    folder = copied(written, tmp_path)
    path = folder / "canonical" / f"{NAME}.safetensors"
    save_file({"exp_avg": load_file(path)["exp_avg"]}, path)
    checkpoint = UnshardedCheckpoint.open(folder)
    with pytest.raises(UserError, match="does not hold the weight"):
        checkpoint.parameter(NAME)
    save_file({"fp32": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=r"its model says fp32 \[45\]"):
        checkpoint.parameter(NAME)
    path.write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.parameter(NAME)


# ---------------------------------------------------------------- a run that continues from one


def as_run(source, folder, tmp_path):
    """The source's run with *folder* in place of its checkpoint."""
    run = shape_run(Path(source.run.data), tmp_path, source.shape, *ODD_MODEL)
    shutil.copytree(source.run.folder, run.folder)
    target = newest(run.folder)
    shutil.rmtree(target)
    shutil.copytree(folder, target)
    return run


@pytest.mark.parametrize("shape", [Shape(1, 3), Shape(2, 2)], ids=str)
def test_a_run_continues_from_a_canonical_folder(source, written, tmp_path, shape):
    run = as_run(source, written, tmp_path)
    found = run_distributed(load_and_gather, shape.ranks, run, shape, tmp_path / "again", timeout=120)[0]
    assert differences(found["parameters"], source.reference["parameters"]) == []
    assert found["groups"] == source.reference["groups"] and found["steps"] == {3}
