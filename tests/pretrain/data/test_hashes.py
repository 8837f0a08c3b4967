"""Corpora are compared with their hashes beside the training: nothing is kept of a run on damaged ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pretrain.data import hashes
from pretrain.data.corpus import Corpus
from pretrain.data.hashes import REMEMBERED, HashCheck, files_seen
from pretrain.runtime.signals import STOPPED, Stopped
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.training import build, curve, fit, nano_run, session


@pytest.fixture
def copied(small_folder, tmp_path):
    return Path(shutil.copytree(small_folder, tmp_path / "copied", ignore=shutil.ignore_patterns(REMEMBERED)))


def checked(folder: Path, run_folder: Path) -> tuple[list[str], str | None]:
    """The files that are read, and the problem."""
    with mock.patch.object(hashes, "damage", wraps=hashes.damage) as read:
        check = HashCheck([Corpus.open(folder)] * 2, run_folder)
        check.wait()
    assert not check.running
    return [call.args[0].name for call in read.call_args_list], check.problem


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_is_read_again_when_it_has_changed(copied, tmp_path, monkeypatch, writable):
    monkeypatch.setattr(os, "access", lambda path, mode: writable)  # root may write anywhere
    files = ["training.bin", "training.idx", "validation.bin", "validation.idx"]
    assert checked(copied, tmp_path) == (files, None)
    assert checked(copied, tmp_path) == ([], None)
    assert (copied / REMEMBERED).exists() == writable
    os.utime(copied / "training.idx", ns=(1, 1))
    assert checked(copied, tmp_path) == (["training.idx"], None)
    (copied / "other").write_bytes((copied / "training.bin").read_bytes())
    shutil.copystat(copied / "training.bin", copied / "other")
    (copied / "other").rename(copied / "training.bin")  # the same size and time, another inode
    assert checked(copied, tmp_path) == (["training.bin"], None)
    damage(copied / "validation.bin", "flipped")
    for _ in range(2):
        read, problem = checked(copied, tmp_path)
        assert read == ["validation.bin"] and "validation.bin' is not what was written" in str(problem)


def test_ranks_that_see_the_same_files_share_the_reading(small_folder, copied, tmp_path):
    (tmp_path / "mounted").symlink_to(small_folder)
    seen = [files_seen([Corpus.open(folder)]) for folder in (small_folder, tmp_path / "mounted", copied)]
    assert seen[0] == seen[1] != seen[2] and len(seen[0]) == 4


@pytest.mark.parametrize("content", ["", "[]", "{", '{"training.bin": [1]}', "[" * 10**5])
def test_what_is_remembered_is_not_trusted_to_make_sense(copied, tmp_path, content):
    (copied / REMEMBERED).write_text(content)
    assert len(checked(copied, tmp_path)[0]) == 4
    assert len(json.loads((copied / REMEMBERED).read_text())) == 4


def slowly(run: Any) -> tuple[Any, int]:
    """A session in which the first file is read when the first steps are done; its result, and the files that
    this rank read."""
    state = hashes._state

    def slow(path: Path, entry: Any) -> str:
        beside = threading.current_thread() is not threading.main_thread()
        while beside and not (run.folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        return state(path, entry)

    with (
        mock.patch.object(hashes, "_state", slow),
        mock.patch.object(hashes, "damage", wraps=hashes.damage) as read,
    ):
        return session(run), read.call_count


@contextlib.contextmanager
def endless_reading() -> Iterator[None]:
    """Inside the block, the thread of a session that compares the corpora does not come to an end."""
    state, released = hashes._state, threading.Event()

    def endless(path: Path, entry: Any) -> str:
        if threading.current_thread() is not threading.main_thread():
            released.wait(60)
        return state(path, entry)

    with mock.patch.object(hashes, "_state", endless):
        try:
            yield
        finally:
            released.set()


def ask_to_stop(opened: Any) -> None:
    listener = opened.trainer.control.listener
    assert listener is not None
    listener._ask("a test", STOPPED)


def stop_while_reading(run: Any) -> tuple[int | None, bool]:
    """A session that is asked to stop at its first step, while a file is read that takes for ever: the step
    that it saved, and whether the reading was still going on."""
    with endless_reading():
        opened = build(run)
        ask_to_stop(opened)
        try:
            fit(opened)
        except Stopped as stop:
            return stop.saved_step, opened.trainer.hashes.running
    return None, False


def test_a_stop_does_not_wait_for_the_reading(copied, tmp_path):
    run = nano_run(copied, tmp_path / "runs")
    assert run_distributed(stop_while_reading, 1, run, timeout=120) == [(1, True)]
    assert (run.folder / "checkpoints/step_000001/manifest.json").is_file()
    assert run_distributed(session, 1, run, timeout=120)[0][1] is None  # the next session reads, and goes on


def stop_at_a_checkpoint(run: Any) -> tuple[int | None, int]:
    """A session that is asked to stop while it waits for the reading, at the second checkpoint; the step that
    it saved, and the one at which it was asked."""
    asked: list[int] = []

    def wait(self: Any, seconds: float | None = None) -> None:
        if not asked and seconds is not None:
            asked.append(opened.trainer.state.step)
            ask_to_stop(opened)

    with endless_reading(), mock.patch.object(HashCheck, "wait", wait):
        opened = build(run)
        try:
            fit(opened)
        except Stopped as stop:
            return stop.saved_step, asked[0]
    return None, 0


def test_the_first_checkpoint_does_not_wait_for_the_reading(copied, tmp_path):
    """The second does, and hears a request to stop."""
    run = nano_run(copied, tmp_path / "runs", "--checkpoint.background true --checkpoint.keep_last 3")
    assert run_distributed(stop_at_a_checkpoint, 1, run, timeout=120) == [(9, 8)]
    steps = [path.name for path in sorted((run.folder / "checkpoints").iterdir())]
    assert steps == ["step_000004", "step_000008", "step_000009"]


@pytest.mark.slow
def test_a_damaged_corpus_leaves_no_checkpoint_and_what_was_saved_stays(copied, tmp_path):
    run = nano_run(copied, tmp_path / "runs", "--checkpoint.background", "true")
    (_, read), (_, other) = run_distributed(slowly, 2, run, timeout=120)
    assert (read, other) == (4, 0), "one rank of a node reads"
    steps = sorted((run.folder / "checkpoints").iterdir())
    assert steps[-1].name == "step_000012"
    damage(copied / "training.bin", "flipped")
    again = nano_run(copied, tmp_path / "runs", "--steps", "20")
    new = nano_run(copied, tmp_path / "runs", "--steps", "20", "--name", "new")
    for changed in (again, new):
        for (_, error), _ in run_distributed(slowly, 2, changed, timeout=120):
            assert error is not None and error.startswith("data: ") and "\n" not in error
            assert "training.bin' is not what was written (its hash differs from meta.json)" in error
    assert sorted((run.folder / "checkpoints").iterdir()) == steps
    assert list((new.folder / "checkpoints").iterdir()) == []
    assert curve(new.folder), "the first steps do not wait"
