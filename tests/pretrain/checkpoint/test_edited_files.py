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
from safetensors.torch import save_file

from model.errors import UserError
from pretrain.checkpoint import deepspeed_files
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.state import FEATURES, read_features
from pretrain.checkpoint.unsharded import UnshardedCheckpoint
from pretrain.utils.files import file_entry
from tests.helpers.distributed import run_distributed
from tests.helpers.fuzzing import fixed, seeded
from tests.helpers.training import nano_run, session

NUMBERS = [None, True, -1, 0, 7, 10**12, 10**30, float("nan"), 1e300]
OTHERS = ["", "x", b"x", [], [None], {}, {"x": 1}, (), (1, 2)]
TENSORS = [
    *(torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(0)),
    *(torch.zeros(5, dtype=torch.int64), torch.tensor(float("nan"))),
]
junk = st.sampled_from([*NUMBERS, *OTHERS, *TENSORS])
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
    """Everything of a checkpoint, as conversion and reshaping read it."""
    checkpoint = UnshardedCheckpoint.open(folder)
    checkpoint.check()
    for name in checkpoint.names():
        checkpoint.parameter(name)
        checkpoint.optimizer_state(name)


def only_user_errors(folder: Path) -> Any:
    """A test of one edit in one of a checkpoint's .pt files."""
    files = {
        path.name: deepspeed_files.load_safely(path)
        for path in sorted((folder / "deepspeed").glob("*_states.pt"))
    }
    places = [(name, path) for name, content in files.items() for path in [(), *paths(content)]]

    @given(st.sampled_from(places), junk | st.just(_GONE))
    def test(place: tuple[str, tuple[Any, ...]], new: Any) -> None:
        def load(path: Path) -> Any:
            if path.name != place[0]:
                return files[path.name]
            if not place[1]:
                return None if new is _GONE else new
            return edited(files[path.name], place[1], new)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deepspeed_files, "load_safely", load)
            try:
                read_all(folder)
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 600 + 2 * len(str(folder))

    return test


def newest(run: Any) -> Path:
    return sorted((run.folder / "checkpoints").glob("step_*"))[-1]


def test_any_edit_of_a_file_is_read_or_refused(finished):
    fixed(only_user_errors(newest(finished)), examples=40)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_any_edit_of_a_file_is_read_or_refused_at_length(small_folder, tmp_path, stage):
    run = nano_run(small_folder, tmp_path, "--steps", "4", "--precision", "bf16")
    run_distributed(session, 1, run, stage, timeout=120)
    seeded(only_user_errors(newest(run)), examples=200)


def recompute(folder: Path) -> None:
    """The manifest of what is there now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        name: file_entry(folder / name) for name in manifest["files"] if (folder / name).is_file()
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder) is None


@pytest.mark.parametrize(
    ("pattern", "content"),
    [
        ("random_states.pt", [{"torch": "x"}]),
        ("random_states.pt", []),
        ("random_states.pt", b"no pickle"),
        ("*model_states.pt", {"module": {"x": 1}}),
        ("*model_states.pt", b"no pickle"),
        ("*optim_states.pt", {"optimizer_state_dict": []}),
        ("mp_rank_00_model_states.pt", None),
        ("*optim_states.pt", "cut"),
    ],
)
def test_a_run_that_would_continue_from_it_ends_in_one_line(
    finished, tmp_path, small_folder, pattern, content
):
    run = nano_run(small_folder, tmp_path, "--steps", "14")
    shutil.copytree(finished.folder, run.folder)
    paths = list((newest(run) / "deepspeed").glob(pattern))
    assert paths
    for path in paths:
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is None:
            path.unlink()
        elif content == "cut":
            edit(path, EDITS["short master"][1])
        else:
            torch.save(content, path)
    recompute(newest(run))
    _, error = run_distributed(session, 1, run, timeout=120)[0]
    assert error is not None and error.startswith("checkpoint: ") and "\n" not in error
    assert paths[0].name in error


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = copy.deepcopy(deepspeed_files.load_safely(path))
    change(content)
    torch.save(content, path)


def masters(content: Any) -> list[torch.Tensor]:
    optimizer = content["optimizer_state_dict"]
    return optimizer.get("fp32_flat_groups") or optimizer["single_partition_of_fp32_groups"]


def moments(content: Any) -> list[dict[str, Any]]:
    optimizer = content["optimizer_state_dict"]
    adam = optimizer["optimizer_state_dict" if "fp32_flat_groups" in optimizer else "base_optimizer_state"]
    return list(adam["state"].values())


OPTIMIZER, MODEL = "zero_pp_rank_1_*optim_states.pt", "*mp_rank_00_model_states.pt"
EDITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no master": (OPTIMIZER, lambda saved: masters(saved).pop()),
    "short master": (OPTIMIZER, lambda saved: masters(saved).append(masters(saved).pop()[:-1])),
    "short moment": (OPTIMIZER, lambda saved: moments(saved)[0].update(exp_avg=torch.zeros(9))),
    "no moment": (OPTIMIZER, lambda saved: moments(saved)[-1].pop("exp_avg_sq")),
    "whole numbers": (OPTIMIZER, lambda saved: masters(saved).append(masters(saved).pop().long())),
    "more ranks": (MODEL, lambda saved: saved.update(dp_world_size=4)),
    "no number of ranks": (MODEL, lambda saved: saved.pop("mp_world_size")),
    "other shapes": (MODEL, lambda saved: saved["param_shapes"].pop()),
}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_s_files_are_checked_before_a_resume(small_folder, tmp_path, stage):
    run = nano_run(small_folder, tmp_path, "--steps", "4")
    run_distributed(session, 2, run, stage, timeout=120)
    UnshardedCheckpoint.open(newest(run)).check()
    for number, (pattern, change) in enumerate([*EDITS.values(), (OPTIMIZER, None), (MODEL, None)]):
        folder = Path(shutil.copytree(newest(run), tmp_path / str(number)))
        path = sorted((folder / "deepspeed").glob(pattern))[-1]
        path.unlink() if change is None else edit(path, change)
        recompute(folder)
        with pytest.raises(UserError, match=re.escape(path.name)) as refusal:
            UnshardedCheckpoint.open(folder).check()
        assert str(refusal.value).startswith("checkpoint: ") and "\n" not in str(refusal.value)


def test_features_that_make_no_sense(tmp_path):
    path = tmp_path / FEATURES
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match=f"{path} does not hold"):
        read_features(tmp_path)
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, path)
    with pytest.raises(UserError, match=r"a is torch\.int8"):
        read_features(tmp_path)
