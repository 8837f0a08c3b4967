"""Checkpoints written beside the training: the same bytes as at once, whole or not at all, errors in
front."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.writer import RankWriter
from pretrain.utils.files import file_entry
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import contents, differences
from tests.helpers.training import curve, nano_run, session

TENSORS = {
    "fp32.0": torch.arange(1001.0),
    "random.python": torch.rand(3, dtype=torch.float64),
    "random.torch": torch.arange(5, dtype=torch.uint8),
    "fp32.1": torch.zeros(0),
}


def copied() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in TENSORS.items()}


def assert_written(path: Path, writer: RankWriter) -> None:
    assert writer.problem is None and writer.written == {path.name: file_entry(path)}
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_safetensors_reads_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.writer.CHUNK_BYTES", 100)
    assert_written(tmp_path / "a", RankWriter(tmp_path / "a", copied(), background=False))


def test_training_goes_on_while_it_writes(tmp_path, monkeypatch):
    may_write = threading.Event()
    original = RankWriter._write

    def slow(self):
        may_write.wait()
        original(self)

    monkeypatch.setattr(RankWriter, "_write", slow)
    tensors = copied()
    writer = RankWriter(tmp_path / "a", tensors, background=True)
    tensors["fp32.0"].zero_()  # the next update
    assert writer.running and not (tmp_path / "a").exists()
    may_write.set()
    writer.wait()
    assert not writer.running
    assert_written(tmp_path / "a", writer)


def test_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.checkpoint.writer.TensorFile.write", lambda self, tensor: time.sleep(0.05))
    monkeypatch.setattr("pretrain.checkpoint.writer.CHUNK_BYTES", 1)
    writer = RankWriter(tmp_path / "a", copied(), background=True)
    writer.give_up()
    assert not writer.running and not writer._tensors


ERRORS = {"No space left": OSError(28, "No space left on device"), "RuntimeError: odd": RuntimeError("odd")}


@pytest.mark.parametrize(("text", "error"), ERRORS.items())
def test_an_error_of_the_thread_comes_up(tmp_path, monkeypatch, error, text):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("pretrain.checkpoint.writer.TensorFile.write", fail)
    writer = RankWriter(tmp_path / "a", copied(), background=True)
    writer.wait()
    assert writer.problem is not None and "cannot write a" in writer.problem and text in writer.problem
    assert writer.written == {}


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
    original, most = RankWriter._write, [0, 0]

    def slow(self):
        most[0] += 1
        most[1] = max(most)
        time.sleep(0.3)
        original(self)
        most[0] -= 1

    RankWriter._write = slow
    try:
        return session(run, stage), most[1]
    finally:
        RankWriter._write = original


@pytest.mark.slow
def test_at_most_one_at_a_time(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--checkpoint.every 1 --steps 4 --checkpoint.keep_last 9")
    assert run_distributed(slow_session, 2, run, 2, timeout=120) == [(([], None), 1)] * 2
    folders = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert folders == [f"step_{step:06d}" for step in range(1, 5)]
    assert all(verify(run.folder / "checkpoints" / name) is None for name in folders)
