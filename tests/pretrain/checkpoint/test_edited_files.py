"""Checkpoints whose files were edited and the manifest recomputed: what makes no sense is one line."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.errors import UserError
from pretrain.checkpoint.index import INDEX, TENSORS_FOLDER, rank_file
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.sharded_files import UnshardedCheckpoint
from pretrain.checkpoint.state import FEATURES, read_features
from pretrain.utils.files import file_entry
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.fuzzing import fixed, seeded
from tests.helpers.training import nano_run, session

NUMBERS = [None, True, -1, 0, 7, 10**12, 10**30, float("nan"), 1e300]
junk = st.sampled_from([*NUMBERS, "", "x", "../x", [], [None], [0, 0, 0, 1], {}, {"x": 1}])
_GONE = object()


def paths(value: Any, depth: int = 5) -> Iterator[tuple[Any, ...]]:
    """Where something is in nested containers."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))[:3]
    for key, inner in items:
        yield (key,)
        if depth > 1:
            yield from ((key, *rest) for rest in paths(inner, depth - 1))


def edited(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with *new* at *path*, or without it."""
    changed = copy.copy(value) if isinstance(value, dict) else list(value)
    if len(path) > 1:
        changed[path[0]] = edited(value[path[0]], path[1:], new)
    elif new is _GONE:
        del changed[path[0]]
    else:
        changed[path[0]] = new
    return type(value)(changed) if type(value) is tuple else changed


def read_all(folder: Path) -> None:
    """Everything of a checkpoint, as conversion and resharding read it."""
    checkpoint = UnshardedCheckpoint.open(folder)
    checkpoint.check()
    for name in checkpoint.names():
        checkpoint.parameter(name)
        checkpoint.optimizer_state(name)


def only_user_errors(folder: Path) -> Any:
    """A test of one edit in the index."""
    path = folder / TENSORS_FOLDER / INDEX
    content = json.loads(path.read_text())
    places = [(), *paths(content)]

    @given(st.sampled_from(places), junk | st.just(_GONE))
    def test(place: tuple[Any, ...], new: Any) -> None:
        path.write_text(json.dumps(edited(content, place, new) if place else None))
        try:
            read_all(folder)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 600 + 2 * len(str(folder))

    return test


def newest(run: Any) -> Path:
    return sorted((run.folder / "checkpoints").glob("step_*"))[-1]


def test_any_edit_of_the_index_is_read_or_refused(finished, tmp_path):
    fixed(only_user_errors(Path(shutil.copytree(newest(finished), tmp_path / "copy"))), examples=60)


@pytest.mark.slow
def test_any_edit_of_the_index_is_read_or_refused_at_length(finished, tmp_path):
    seeded(only_user_errors(Path(shutil.copytree(newest(finished), tmp_path / "copy"))), examples=400)


def recompute(folder: Path) -> None:
    """The manifest of what is there now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        name: file_entry(folder / name) for name in manifest["files"] if (folder / name).is_file()
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder) is None


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def edit_index(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def norm(index: Any) -> Any:
    return index["parameters"]["final_norm.weight"]


LAST = rank_file(1)
EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no master": (LAST, edit_tensors(lambda held: held.pop("fp32.0"))),
    "short master": (LAST, edit_tensors(lambda held: held.update({"fp32.0": held["fp32.0"][:-9].clone()}))),
    "short moment": (LAST, edit_tensors(lambda held: held.update({"exp_avg.0": torch.zeros(9)}))),
    "no moment": (LAST, edit_tensors(lambda held: held.pop("exp_avg_sq.1"))),
    "whole numbers": (LAST, edit_tensors(lambda held: held.update({"fp32.0": held["fp32.0"].long()}))),
    "two dimensions": (LAST, edit_tensors(lambda held: held.update({"fp32.0": held["fp32.0"][None]}))),
    "cut": (LAST, lambda path: damage(path, "truncated")),
    "no safetensors": (LAST, lambda path: path.write_bytes(b"no safetensors file")),
    "no file": (LAST, Path.unlink),
    "more ranks": (INDEX, edit_index(lambda index: index.update(ranks=4))),
    "no number of ranks": (INDEX, edit_index(lambda index: index.pop("ranks"))),
    "another shape": (INDEX, edit_index(lambda index: norm(index)["shape"].append(1))),
    "a piece too few": (INDEX, edit_index(lambda index: norm(index)["shards"][0].pop())),
    "beyond the ranks": (INDEX, edit_index(lambda index: norm(index)["shards"][0][0].__setitem__(0, 9))),
    "no such group": (INDEX, edit_index(lambda index: norm(index).update(group="x"))),
    "learning rate": (INDEX, edit_index(lambda index: index["groups"]["base/decay"].update(lr="x"))),
    "no index": (INDEX, Path.unlink),
}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_s_files_are_checked_before_a_resume(small_folder, tmp_path, stage):
    run = nano_run(small_folder, tmp_path, "--steps", "4")
    run_distributed(session, 2, run, stage, timeout=120)
    UnshardedCheckpoint.open(newest(run)).check()
    for number, (name, change) in enumerate(EDITS.values()):
        folder = Path(shutil.copytree(newest(run), tmp_path / str(number)))
        change(folder / TENSORS_FOLDER / name)
        with pytest.raises(UserError, match=re.escape(name)) as refusal:
            UnshardedCheckpoint.open(folder).check()
        assert str(refusal.value).startswith("checkpoint: ") and "\n" not in str(refusal.value)


RESUMED = {
    "python": edit_tensors(lambda held: held.pop("random.python")),
    "numpy": edit_tensors(lambda held: held.update({"random.numpy": torch.full((627,), -1.0)})),
    "torch": edit_tensors(lambda held: held.update({"random.torch": torch.zeros(3)})),
    "master": edit_tensors(lambda held: held.update({"fp32.0": held["fp32.0"][:9].clone()})),
}


@pytest.mark.parametrize("edit", RESUMED)
def test_a_run_that_would_continue_from_it_ends_in_one_line(finished, tmp_path, small_folder, edit):
    run = nano_run(small_folder, tmp_path, "--steps", "14")
    shutil.copytree(finished.folder, run.folder)
    RESUMED[edit](newest(run) / TENSORS_FOLDER / rank_file(0))
    recompute(newest(run))
    _, error = run_distributed(session, 1, run, timeout=120)[0]
    assert error is not None and error.startswith("checkpoint: ") and "\n" not in error
    assert rank_file(0) in error


def test_features_that_make_no_sense(tmp_path):
    path = tmp_path / FEATURES
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match=f"{path} does not hold"):
        read_features(tmp_path)
    save_file({"growth/a": torch.zeros(2, dtype=torch.int8)}, path)
    with pytest.raises(UserError, match=r"growth/a is torch\.int8"):
        read_features(tmp_path)
    save_file({"mine": torch.arange(2)}, path)  # of a hook that counts
    assert read_features(tmp_path)["mine"].dtype == torch.int64
