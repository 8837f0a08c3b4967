"""Checkpoints: resumed to the bit, refused when they do not fit, never half there."""

import errno
import json
import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from model.errors import MachineError, UserError
from pretrain.assembly.loading import find_newest
from pretrain.checkpoint import manifest
from pretrain.checkpoint import store as module
from pretrain.checkpoint.index import INDEX, TENSORS_FOLDER
from pretrain.checkpoint.manifest import verify
from pretrain.checkpoint.store import CheckpointStore
from pretrain.checkpoint.writer import RankWriter
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import CheckpointConfig
from tests.helpers.damage import damage
from tests.helpers.distributed import run_distributed
from tests.helpers.marks import slow
from tests.helpers.training import alone, build, curve, fit, interrupted, nano_run, session

SLOW = [(1, 1, "bf16"), (1, 2, "fp32"), (1, 3, "fp32"), *((2, stage, "bf16") for stage in (1, 2, 3))]


@pytest.mark.parametrize(("ranks", "stage", "precision"), [(2, 1, "fp32"), *slow(SLOW)])
def test_resume_is_bit_identical(small_folder, tmp_path, ranks, stage, precision):
    whole = nano_run(small_folder, tmp_path, "--precision", precision, "--name", "whole", "--steps", "10")
    broken = nano_run(small_folder, tmp_path, "--precision", precision, "--name", "broken", "--steps", "10")
    run_distributed(session, ranks, whole, stage, timeout=120)
    assert set(run_distributed(interrupted, ranks, broken, 7, ranks, stage, timeout=120)) == {"stopped"}
    assert (broken.folder / "latest").read_text() == "step_000004\n"
    assert run_distributed(session, ranks, broken, stage, timeout=120)[0] == ([], None)
    rows = curve(broken.folder)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows == curve(whole.folder)
    assert {"train_loss", "grad_norm", "lr/base/decay", "tokens", "skipped"} <= rows[0].keys()
    assert {"val_loss", "val_bpb"} <= rows[9].keys()


def test_folder_is_self_contained(finished):
    checkpoint = finished.folder / "checkpoints" / "step_000012"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == 12 and state["sequences"] == 12 * 8 and state["tokens"] == 12 * 512
    assert state["model"]["heads"] and state["run"]["model"] == "prism-nano"
    assert (checkpoint / "tokenizer").is_dir() and (finished.folder / "tokenizer").is_dir()
    names = {"config.yaml", "ds_config.json", "metrics.jsonl", "checkpoints", "latest", "plots", "tokenizer"}
    assert {path.name for path in finished.folder.iterdir()} >= names
    assert verify(checkpoint) is None


def numbers_drawn(run):
    """What a rank's generators draw after it has saved, and after another session has loaded that."""

    def draw():
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.normal(),
            *torch.rand(2).tolist(),
        ]

    built = build(run)
    rank = built.world.rank
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    random.gauss(0, 1), np.random.normal()  # both keep a second number
    fit(built)
    drawn = draw()
    fit(build(run))
    return drawn, draw()


def test_every_rank_draws_on_from_where_it_was(small_folder, tmp_path):
    run = nano_run(
        small_folder, tmp_path, "--steps", "1", "--checkpoint.every", "0", "--validation.every", "0"
    )
    (first, again), (other, other_again) = run_distributed(numbers_drawn, 2, run, timeout=120)
    assert first == again and other == other_again and first != other


def test_keeps_the_last_and_every_nth(small_folder, tmp_path):
    flags = "--steps 10 --checkpoint.every 1 --checkpoint.keep_last 2 --checkpoint.keep_every 4"
    run = nano_run(small_folder, tmp_path, *flags.split(), "--validation.every", "0")
    run_distributed(session, 1, run, timeout=120)
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000008", "step_000009", "step_000010"]


def test_falls_back_to_the_previous_valid_one(small_folder, tmp_path):
    """How each kind of damage is found is in test_manifest.py."""
    run = nano_run(small_folder, tmp_path, "--steps", "8")
    run_distributed(session, 2, run, timeout=120)
    damage(run.folder / "checkpoints/step_000008/weights_and_optimizer/rank_00001.safetensors", "flipped")
    (notes, error), _ = run_distributed(session, 2, run, timeout=120, steps=9)
    assert error is None
    assert "contents that were written" in notes[0] and "continuing from step_000004" in notes[0]
    assert [row["step"] for row in curve(run.folder)] == list(range(1, 10))
    assert "steps changed: 8 -> 9" in notes


def session_that_cannot_read(run):
    """One in which rank 1 cannot read its share of the newest checkpoint, since its file system is away."""
    opened = manifest.open_regular

    def open_regular(path):
        away = "step_000012" in str(path) and not str(path).endswith(manifest.MANIFEST)
        if away and torch.distributed.get_rank() == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path)

    with mock.patch.object(manifest, "open_regular", open_regular):
        try:
            build(run)
        except UserError as error:
            return type(error), str(error)


def test_one_that_cannot_be_read_now_is_not_passed_over(small_folder, tmp_path):
    """Or it would be deleted as that of a curve that the run has left."""
    run = nano_run(small_folder, tmp_path)
    run_distributed(session, 2, run, timeout=120)
    for kind, line in run_distributed(session_that_cannot_read, 2, run, timeout=120):
        assert kind is MachineError and line.startswith("checkpoints: rank 1: ")
        assert "cannot be read (Stale file handle); try again" in line


def test_a_damaged_one_comes_back_from_the_mirror(small_folder, tmp_path):
    mirror = f"--checkpoint.mirror file://{tmp_path}/mirror"
    run = nano_run(small_folder, tmp_path / "runs", "--steps 8", mirror)
    run_distributed(session, 1, run, timeout=120)
    damage(run.folder / "checkpoints/step_000008/weights_and_optimizer/rank_00000.safetensors", "flipped")
    ((notes, error),) = run_distributed(session, 1, run, timeout=120, steps=9)
    assert error is None and "was damaged" in notes[0] and "continuing from step_000008" in notes[0]
    shutil.rmtree(tmp_path / "mirror")  # and without the copy
    damage(run.folder / "checkpoints/step_000009/weights_and_optimizer/rank_00000.safetensors", "flipped")
    ((notes, error),) = run_distributed(session, 1, run, timeout=120, steps=10)
    assert error is None and "continuing from step_000008" in notes[0]


def test_the_optimizers_settings_are_those_of_the_session(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--steps", "4")
    run_distributed(session, 1, run, timeout=120)
    changed = replace(run.optimizer, betas=(0.5, 0.6), eps=1e-3)
    notes, error = run_distributed(session, 1, run, timeout=120, steps=8, optimizer=changed)[0]
    assert error is None and "optimizer.betas changed: [0.9, 0.95] -> [0.5, 0.6]" in notes
    index = json.loads((run.folder / "checkpoints/step_000008" / TENSORS_FOLDER / INDEX).read_text())
    assert [(group["betas"], group["eps"]) for group in index["groups"].values()] == [([0.5, 0.6], 1e-3)] * 2


def test_no_valid_checkpoint_is_refused(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--steps", "2", "--checkpoint.every", "0")
    run_distributed(session, 1, run, timeout=120)
    (run.folder / "checkpoints/step_000002/manifest.json").write_text("{")
    _, error = run_distributed(session, 1, run, timeout=120)[0]
    assert error.startswith("checkpoints: no valid one in") and "is not valid JSON" in error


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--heads", "4x4"], ["heads"]),
        (["--architecture.norm", "layernorm", "--seed", "9"], ["norm", "seed: 1 != 9"]),
        (["--optimizer.decay_embeddings", "true"], ["optimizer.decay_embeddings: False != True"]),
        (["--resume", "never"], ["already holds a checkpoint (step_000012)"]),
    ],
)
def test_another_run_in_the_same_folder_is_refused(small_folder, finished, change, named):
    run = nano_run(small_folder, Path(finished.runs_dir), *change)
    before = (finished.folder / "config.yaml").read_bytes()
    _, error = run_distributed(session, 1, run, timeout=120)[0]
    assert error is not None and error.startswith("resume: ")
    for text in named:
        assert text in error
    assert (finished.folder / "config.yaml").read_bytes() == before


def started_again(run):
    with mock.patch.dict("os.environ", {"SLURM_RESTART_COUNT": "1"}):
        return session(run)[1]


def test_a_job_that_slurm_starts_again_continues_what_it_began(small_folder, finished):
    run = nano_run(small_folder, Path(finished.runs_dir), "--resume", "never")
    assert run_distributed(started_again, 1, run, timeout=120)[0] is None


class Unwritable:
    """Stands for a full disk: every write fails after *room* bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def session_on_full_disk(run, rank, room, steps):
    """A session in which *rank* cannot write more than *room* bytes per checkpoint file once past *steps*
    steps."""
    original = RankWriter._write

    def write(self):
        opened = Path.open

        def open_limited(self, *args, **kwargs):
            return Unwritable(opened(self, *args, **kwargs), room)

        if torch.distributed.get_rank() == rank and f"step_{steps:06d}" in str(self.path):
            Path.open = open_limited
        try:
            original(self)
        finally:
            Path.open = opened

    RankWriter._write = write
    try:
        return session(run)
    finally:
        RankWriter._write = original


@pytest.mark.parametrize(("rank", "room"), [(0, 20_000), *slow([(1, 0)])])
def test_full_disk_keeps_the_older_checkpoint(small_folder, tmp_path, rank, room):
    run = nano_run(small_folder, tmp_path)
    for _, error in run_distributed(session_on_full_disk, 2, run, rank, room, 8, timeout=120):
        assert error.startswith("checkpoint: ") and "No space left on device" in error
        assert ("rank 1:" in error) == (rank == 1)
        assert "the checkpoint of step 4 stays" in error
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_000004"]
    assert (run.folder / "latest").read_text() == "step_000004\n"
    # With room again, the run goes on from there.
    assert run_distributed(session, 2, run, timeout=120)[0] == ([], None)


def test_unwritable_folder_is_said_once(tmp_path):
    store = CheckpointStore(tmp_path / "file" / "run", CheckpointConfig(), alone())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory; there is no earlier checkpoint"):
        store._stop_on(store._prepare(store.folder / ".writing", tmp_path), store.folder / ".writing")


def test_a_checkpoint_whose_replacement_was_cut_is_found(tmp_path):
    aside = tmp_path / "checkpoints/.replaced_step_000004"
    aside.mkdir(parents=True)
    store = CheckpointStore(tmp_path, CheckpointConfig(), alone())
    run = RunConfig(name=tmp_path.name, runs_dir=str(tmp_path.parent))
    with pytest.raises(UserError, match="checkpoint step_000004 is damaged"):  # found, and looked at
        find_newest(run, store)
    assert store.steps() == [4] and not aside.exists()


def kept(steps: set[int], newest: int, keep_last: int, keep_every: int) -> set[int]:
    """What a run keeps once it has written *newest*: nothing of a curve that it has left by falling back."""
    own = sorted((step for step in steps if step <= newest), reverse=True)
    return {
        step for place, step in enumerate(own) if place < keep_last or (keep_every and not step % keep_every)
    }


@pytest.mark.parametrize("seed", range(20))
def test_what_is_deleted_after_a_fall_back_is_never_what_was_just_written(tmp_path, seed):
    """Damaged checkpoints of later steps lie around then."""
    draw = random.Random(seed)
    steps = set(draw.sample(range(1, 30), draw.randint(1, 8)))
    newest, keep_last, keep_every = draw.choice([*steps]), draw.randint(1, 3), draw.choice([0, 2, 5])
    for step in steps:
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    store = CheckpointStore(tmp_path, CheckpointConfig(keep_last=keep_last, keep_every=keep_every), alone())
    store._prune(newest)
    assert set(store.steps()) == kept(steps, newest, keep_last, keep_every) and newest in store.steps()


def deleting_threads(run):
    """Train; the main thread, and those in which checkpoints were deleted."""
    threads, rmtree = [], shutil.rmtree

    def deleting(folder, ignore_errors):
        if ".deleting_" in str(folder):
            threads.append(threading.get_ident())
        rmtree(folder, ignore_errors)

    with mock.patch.object(module.shutil, "rmtree", deleting):
        session(run)
    return threading.get_ident(), threads


def test_training_does_not_wait_for_a_deletion(small_folder, tmp_path):
    """The next checkpoint does, and the end of the run."""
    run = nano_run(
        small_folder, tmp_path, "--steps", "4", "--checkpoint.every", "1", "--checkpoint.keep_last", "1"
    )
    ((main, threads),) = run_distributed(deleting_threads, 1, run)
    assert threads and main not in threads
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_000004"]


def test_a_checkpoint_that_cannot_be_deleted_is_a_line(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(1, "Operation not permitted", str(folder))

    monkeypatch.setattr(module, "remove", refuse)
    store = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1), alone())
    for step in (1, 2):
        store.path(step).mkdir(parents=True)
    store._prune_or_note(2)
    problem = store._prepare(store.folder / ".writing_step_000003", tmp_path)
    assert problem == f"cannot delete {store.path(1)}: Operation not permitted"
    assert store.end_pruning() is None
