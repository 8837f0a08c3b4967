"""Checkpoints written beside the training: the same bytes as at once, whole or not at all, errors in
front."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import pytest
import torch

from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.writer import RecordingCheckpointEngine, copied_to_host
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import contents, differences
from tests.helpers.training import curve, nano_run, session


def test_a_copy_no_longer_changes():
    weight = torch.arange(6.0).reshape(2, 3)
    value = {
        "weight": weight,
        "again": weight,
        "view": weight[1],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nested": [({"step": torch.tensor(3), "name": "adam"},), OrderedDict(a=torch.zeros(0))],
        "number": 7,
    }
    copy = copied_to_host(value)
    weight.fill_(-1)
    assert copy["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and copy["view"].tolist() == [3, 4, 5]
    assert copy["again"] is copy["weight"], "written once"
    assert copy["view"].untyped_storage().nbytes() == 12, "a view takes no more than itself"
    assert isinstance(copy["parameter"], torch.nn.Parameter)
    assert isinstance(copy["nested"][1], OrderedDict) and copy["nested"][0][0]["step"].item() == 3
    assert copy["number"] == 7


def test_training_goes_on_while_it_writes(tmp_path, monkeypatch):
    may_write = threading.Event()
    original = RecordingCheckpointEngine._write

    def slow(self, state_dict, path):
        may_write.wait()
        original(self, state_dict, path)

    monkeypatch.setattr(RecordingCheckpointEngine, "_write", slow)
    weight = torch.arange(1000.0)
    writer = RecordingCheckpointEngine(background=True)
    writer.save({"weight": weight}, str(tmp_path / "a.pt"))
    writer.start()
    weight.zero_()  # the next update
    assert writer.running and not (tmp_path / "a.pt").exists()
    may_write.set()
    writer.wait()
    assert not writer.running and writer.problem is None and set(writer.written) == {"a.pt"}
    assert torch.equal(torch.load(tmp_path / "a.pt")["weight"], torch.arange(1000.0))


ERRORS = {"No space left": OSError(28, "No space left on device"), "RuntimeError: odd": RuntimeError("odd")}


@pytest.mark.parametrize(("text", "error"), ERRORS.items())
def test_an_error_of_the_thread_comes_up(tmp_path, monkeypatch, error, text):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", fail)
    writer = RecordingCheckpointEngine(background=True)
    writer.save({}, str(tmp_path / "a.pt"))
    writer.start()
    writer.wait()
    assert writer.problem is not None and "cannot write a.pt" in writer.problem and text in writer.problem


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_the_same_as_written_at_once(small_folder, tmp_path, ranks, stage):
    """Every tensor of every checkpoint, the curve, and a run that goes on from it."""
    runs = {}
    for background in ("true", "false"):
        more = ("--checkpoint.background", background, "--checkpoint.keep_last", "9", "--steps", "8")
        runs[background] = nano_run(small_folder, tmp_path / background, *more)
        assert run_distributed(session, ranks, runs[background], stage, timeout=120) == [([], None)] * ranks
    assert curve(runs["true"].folder) == curve(runs["false"].folder)
    for name in ("step_000004", "step_000008"):
        one, other = (run.folder / "checkpoints" / name for run in runs.values())
        assert verify(one) is None and verify(other) is None
        assert differences(contents(one), contents(other)) == []
        written = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (one, other)]
        assert written[0] == written[1]


def slow_session(run, stage):
    """Writing takes longer than the steps between two checkpoints."""
    original, most = RecordingCheckpointEngine._write, [0, 0]

    def slow(self, state_dict, path):
        most[0] += 1
        most[1] = max(most)
        time.sleep(0.3)
        original(self, state_dict, path)
        most[0] -= 1

    RecordingCheckpointEngine._write = slow
    try:
        return session(run, stage), most[1]
    finally:
        RecordingCheckpointEngine._write = original


@pytest.mark.slow
def test_at_most_one_at_a_time(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--checkpoint.every 1 --steps 4 --checkpoint.keep_last 9")
    assert run_distributed(slow_session, 2, run, 2, timeout=120) == [(([], None), 1)] * 2
    folders = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert folders == [f"step_{step:06d}" for step in range(1, 5)]
    assert all(verify(run.folder / "checkpoints" / name) is None for name in folders)
