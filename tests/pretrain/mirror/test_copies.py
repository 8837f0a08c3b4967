"""Copies of checkpoints in a store: whole and verified or not there, and the way back."""

import json
import random
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from model.errors import MachineError, UserError
from model.presets import preset
from pretrain.checkpoint.manifest import MANIFEST, verify, write_manifest
from pretrain.checkpoint.store import CheckpointStore
from pretrain.config.run_config import INITIAL_MODEL, RunConfig
from pretrain.config.sections import CheckpointConfig, OptimizerConfig
from pretrain.mirror import hook as hook_module
from pretrain.mirror.copies import (
    RECORD,
    Mirror,
    fetch_initial_model,
    refuse_copy,
    repair_checkpoint,
    restore_lost,
)
from pretrain.mirror.hook import MirrorHook
from pretrain.mirror.object_store import Store, check_mirror
from pretrain.utils.files import file_entry
from pretrain.utils.format import ProgressLine
from tests.helpers.training import alone

SOON = (0.01, 0.02)


def write_checkpoint(run, step, seed=0):
    """A checkpoint as far as copying needs it."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    contents = random.Random(f"{step} {seed}")
    files = {}
    for name in (
        "state.json",
        "tensors/rank_0",
        "tensors/rank_1",
        "tokenizer/tokenizer.model",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.randbytes(contents.randint(0, 20_000)))
        files[name] = file_entry(path)
    write_manifest(folder, files)
    (run / "config.yaml").write_text(f"steps: {step}\n")
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, step + 1)))
    return folder


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/mirror"


def test_copies_are_whole_and_named(run, url, tmp_path):
    write_checkpoint(run, 2)
    said = []
    mirror = Mirror(url, run, said.append, SOON)  # the first was left by an earlier session
    mirror.add(write_checkpoint(run, 4))
    assert mirror.close() is None and said == []
    copy = tmp_path / "mirror/one"
    for step in ("step_000002", "step_000004"):
        here, there = (contents(root / "checkpoints" / step) for root in (run, copy))
        manifest = json.loads(there.pop(MANIFEST))
        assert manifest.pop("mirror") == url and manifest == json.loads(here.pop(MANIFEST))
        assert there == here and mirror.is_safe(run / "checkpoints" / step)
    assert (copy / "latest").read_text() == "step_000004\n"
    assert (copy / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    record = json.loads((run / RECORD).read_text())
    assert record["url"] == url and list(record["safe"]) == ["step_000002", "step_000004"]
    again = Mirror(url, run, said.append, SOON, open_store=None)  # nothing is copied twice
    assert again.close() is None and again.is_safe(run / "checkpoints/step_000002")
    other = Mirror(f"{url}2", run, said.append, SOON)  # another store has nothing yet
    assert other.close() is None and (tmp_path / "mirror2/one/latest").exists()


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_copied_again(run, url, tmp_path):
    folder = write_checkpoint(run, 2)

    class Slow(Store):
        once = True

        def replace(self, content, name):
            if Slow.once and name.endswith(MANIFEST):  # all its files are copied
                Slow.once = False
                shutil.rmtree(folder)
                write_checkpoint(run, 2, seed=9)
                mirror.add(folder)
            super().replace(content, name)

    mirror = Mirror(url, run, lambda line: None, SOON, open_store=Slow)
    assert mirror.close() is None and mirror.is_safe(folder)
    copy = tmp_path / "mirror/one/checkpoints/step_000002"
    manifest = json.loads((copy / MANIFEST).read_text())
    for name in json.loads((folder / MANIFEST).read_text())["files"]:
        kept = copy / manifest.get("places", {}).get(name, name)
        assert kept.read_bytes() == (folder / name).read_bytes(), name


class Faulty(Store):
    """A store that fails, or keeps other bytes than it was given, at random."""

    chance = random.Random(0)
    likely = 0.4
    failed = 0

    def put(self, local, name, entry):
        fault = self.chance.choice(["away", "full", "other bytes", "short"])
        if self.chance.random() > self.likely:
            return super().put(local, name, entry)
        type(self).failed += 1
        if fault in ("away", "full"):
            raise ConnectionError("away") if fault == "away" else OSError(28, "No space left on device")
        if not local.stat().st_size:
            raise ConnectionError("away")
        made = self.files.open

        def spoiling(path, mode):
            file = made(path, mode)
            if mode == "wb":
                write = file.write
                file.write = lambda data: write(
                    data[:-1] if fault == "short" else bytes([data[0] ^ 1]) + data[1:]
                )
            return file

        self.files.open = spoiling
        try:
            return super().put(local, name, entry)
        finally:
            self.files.open = made


def test_a_copy_is_safe_only_when_it_reads_back_as_it_was_written(run, url, tmp_path):
    Faulty.failed = 0
    said = []
    mirror = Mirror(url, run, said.append, (0.001, 0.002), Faulty)
    for step in range(1, 7):
        mirror.add(write_checkpoint(run, step))
    deadline = time.monotonic() + 60
    while any(not mirror.is_safe(folder) for folder in (run / "checkpoints").iterdir()):
        assert time.monotonic() < deadline, said
        for name in mirror._safe.copy():  # at any time
            copied = tmp_path / "mirror/one/checkpoints" / name
            assert contents(copied).keys() == contents(run / "checkpoints" / name).keys()
        time.sleep(0.005)
    assert mirror.close() is None and Faulty.failed > 15
    # Each failure once, until it works again.
    assert [("cannot be written" in line) for line in said] == [True, False] * (len(said) // 2)
    for folder in (run / "checkpoints").iterdir():
        here, there = contents(folder), contents(tmp_path / "mirror/one/checkpoints" / folder.name)
        assert {**there, MANIFEST: b""} == {**here, MANIFEST: b""}


def test_a_store_that_stays_away_is_said_once_and_waited_for_by_nobody(run, url):
    def away(url, name):
        raise ConnectionError("nobody answers\nat all")

    said = []
    mirror = Mirror(url, run, said.append, SOON, away)
    mirror.add(write_checkpoint(run, 3))
    time.sleep(0.3)
    began = time.monotonic()
    left = mirror.close(60)
    assert time.monotonic() - began < 5
    assert left == f"step_000003 not copied to {url}; the next session of the run does it"
    assert len(said) == 1 and f"{url} cannot be written (nobody answers" in said[0] and "\n" not in said[0]


def test_a_slow_store_is_waited_for_until_the_run_is_asked_to_stop(run, url):
    begun, released = threading.Event(), threading.Event()

    class Slow(Store):
        def put(self, local, name, entry):
            begun.set()
            released.wait(60)
            return super().put(local, name, entry)

    mirror = Mirror(url, run, print, SOON, Slow)
    mirror.add(write_checkpoint(run, 3))
    assert begun.wait(60)
    asked = iter([False, False, True])
    left = mirror.close(60, lambda: next(asked))
    released.set()
    assert left == f"step_000003 not copied to {url}; the next session of the run does it"


def test_one_that_is_deleted_meanwhile_is_passed_over(run, url, tmp_path):
    first = write_checkpoint(run, 1)

    class Deleting(Store):
        def put(self, local, name, entry):
            shutil.rmtree(first, ignore_errors=True)
            return super().put(local, name, entry)

    mirror = Mirror(url, run, print, SOON, Deleting)
    mirror.add(write_checkpoint(run, 2))
    assert mirror.close() is None and (tmp_path / "mirror/one/latest").read_text() == "step_000002\n"


def test_a_damaged_one_is_passed_over(run, url, tmp_path):
    (write_checkpoint(run, 1) / "tensors/rank_1").write_bytes(b"rotten")
    write_checkpoint(run, 2)
    said = []
    mirror = Mirror(url, run, said.append, SOON)
    assert mirror.close() is None and (tmp_path / "mirror/one/latest").read_text() == "step_000002\n"
    assert any("step_000001 is damaged (tensors/rank_1 " in line and "not copied" in line for line in said)
    assert not mirror.is_safe(run / "checkpoints/step_000001")


def copied(run, url, *steps):
    for step in steps:
        write_checkpoint(run, step)
    mirror = Mirror(url, run, print, SOON)
    assert mirror.close() is None


def test_a_lost_run_comes_back(run, url, tmp_path):
    copied(run, url, 1, 2, 3)
    before = contents(run)
    shutil.rmtree(run)
    assert restore_lost(url, run) == [
        f"step_000003 was fetched from {url}: the run's folder held no checkpoint"
    ]
    after = contents(run)
    assert after.pop("latest") == b"step_000003\n"
    assert list(json.loads(after.pop(RECORD))["safe"]) == ["step_000003"]
    assert json.loads(after.pop(f"checkpoints/step_000003/{MANIFEST}"))["files"]
    assert after.items() <= before.items() and verify(run / "checkpoints/step_000003") is None
    assert restore_lost(url, tmp_path / "runs/other") == []  # nothing is known of it


def test_fetching_shows_progress(run, url, capsys, monkeypatch):
    """Of all files together, part by part."""
    write_checkpoint(run, 3)
    folder = run / "checkpoints/step_000003"
    (folder / "large").write_bytes(bytes(2_500_000))
    write_manifest(folder, {name: file_entry(folder / name) for name in ("large", "state.json")})
    assert Mirror(url, run, print, SOON).close() is None
    shutil.rmtree(run)
    eager = partial(ProgressLine, every_seconds=0.0)
    monkeypatch.setattr("pretrain.mirror.copies.ProgressLine", eager)
    monkeypatch.setattr("pretrain.mirror.object_store.CHUNK_BYTES", 1_000_000)
    restore_lost(url, run)
    lines = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"fetching step_000003: MB {done} of 2" for done in (1, 2, 2, 2)]


def test_a_lost_run_knows_the_model_that_it_began_with(run, url, tmp_path):
    """Where the source of its weights is gone too."""
    model = preset("prism-nano")
    (run / INITIAL_MODEL).write_text(json.dumps(model.to_json()))
    copied(run, url, 3)
    shutil.rmtree(run)
    given = {"model": "hf/gone", "init_from": "hf/gone", "name": "one", "runs_dir": str(run.parent)}
    lost = RunConfig(**given, checkpoint=CheckpointConfig(mirror=url))
    with pytest.raises(UserError, match="'hf/gone' is not a folder"):
        lost.build_model_config()
    fetch_initial_model(lost)
    assert lost.build_model_config() == model
    restore_lost(url, run)
    assert verify(run / "checkpoints/step_000003") is None and (run / INITIAL_MODEL).exists()


def test_an_import_knows_its_model_again(run, url):
    """Its settings name a file in its own folder."""
    model = preset("prism-nano")
    (run / "model.json").write_text(json.dumps(model.to_json()))
    copied(run, url, 0)
    shutil.rmtree(run)
    given = {"model": str(run / "model.json"), "init_from": str(run), "name": "one"}
    lost = RunConfig(**given, runs_dir=str(run.parent), checkpoint=CheckpointConfig(mirror=url))
    fetch_initial_model(lost)
    assert lost.build_model_config() == model


def test_another_run_of_the_name_is_neither_fetched_nor_replaced(run, url, tmp_path):
    """Runs of one name may lie in different folders."""
    write_checkpoint(run, 3)
    own = RunConfig(
        steps=3, name="one", runs_dir=str(run.parent), optimizer=OptimizerConfig(learning_rate=0.1)
    )
    (run / "config.yaml").write_text(own.to_yaml())
    assert Mirror(url, run, print, SOON).close() is None
    before = contents(tmp_path / "mirror")
    longer = replace(own, runs_dir="elsewhere", steps=9, threads=7)
    other = replace(own, seed=2, optimizer=OptimizerConfig(learning_rate=0.2))
    elsewhere = tmp_path / "elsewhere" / "one"
    assert "was fetched" in restore_lost(url, elsewhere, run=longer)[0]
    shutil.rmtree(elsewhere)
    differing = r"is another run \(seed 1, here 2, optimizer.learning_rate 0.1, here 0.2\); give its settings"
    with pytest.raises(UserError, match=differing):
        restore_lost(url, elsewhere, run=other)
    write_checkpoint(elsewhere, 5)
    (elsewhere / "config.yaml").write_text(other.to_yaml())
    said = []
    assert "step_000005 not copied" in Mirror(url, elsewhere, said.append, SOON).close()
    assert "it holds another run of this name: seed 1, here 2" in said[0] and len(said) == 1
    assert contents(tmp_path / "mirror") == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda copy: (copy / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda copy: (copy / "state.json").unlink(), "state.json"),
        (lambda copy: (copy / "state.json").write_bytes(b"x" * 9), "state.json has 9 bytes"),
        (lambda copy: (copy / MANIFEST).write_text("[]"), "object has no attribute"),
        (
            lambda copy: (copy / MANIFEST).write_text(
                json.dumps({"files": {"../../x": {"bytes": 1, "xxh3_128": "a"}}})
            ),
            "give a name inside the folder",
        ),
    ],
    ids=["no manifest", "no file", "other bytes", "no manifest's contents", "a name outside"],
)
def test_what_is_not_whole_is_passed_over(run, url, tmp_path, damage, reason):
    copied(run, url, 1, 2)
    shutil.rmtree(run)
    damage(tmp_path / "mirror/one/checkpoints/step_000002")
    passed_over, fetched = restore_lost(url, run)
    assert "step_000002" in passed_over and reason in passed_over and "step_000001 was fetched" in fetched
    assert not (run / "checkpoints/step_000002").exists()
    shutil.rmtree(run)
    (tmp_path / "mirror/one/checkpoints/step_000001" / MANIFEST).unlink()
    with pytest.raises(UserError, match="holds no checkpoint; give another --name to start from scratch"):
        restore_lost(url, run)


def test_steps_of_a_curve_that_was_left_do_not_come_back(run, url, tmp_path):
    copied(run, url, 1, 9)
    (tmp_path / "mirror/one/latest").write_text("step_000001\n")
    shutil.rmtree(run)
    assert "step_000001 was fetched" in restore_lost(url, run)[0]


def test_a_copy_that_is_newer_than_the_folder_is_reported(run, url, tmp_path):
    copied(run, url, 1, 9)
    shutil.rmtree(run / "checkpoints/step_000009")
    (run / RECORD).unlink()  # a session elsewhere has made it
    said, latest = [], tmp_path / "mirror/one/latest"
    mirror = Mirror(url, run, said.append, SOON)
    mirror.add(write_checkpoint(run, 3))  # as a request to stop saves it
    assert mirror.close(60) is None and latest.read_text() == "step_000009\n"
    assert len(said) == 1 and f"{url}/one has step_000009, and stays with it until this run" in said[0]
    shutil.rmtree(run / "checkpoints")
    rows = (run / "metrics.jsonl").read_text().count("step")
    assert "step_000009 was fetched" in restore_lost(url, run)[0]
    assert (rows, (run / "metrics.jsonl").read_text().count("step")) == (3, 9)
    write_checkpoint(run, 10)
    assert Mirror(url, run, said.append, SOON).close(60) is None and len(said) == 1
    assert latest.read_text() == "step_000010\n"


def test_a_curve_that_the_run_has_left_is_not_ahead(run, url, tmp_path):
    copied(run, url, 1, 9)
    shutil.rmtree(run / "checkpoints/step_000009")
    said, latest = [], tmp_path / "mirror/one/latest"
    write_checkpoint(run, 2)
    assert Mirror(url, run, said.append, SOON).close(60) is None
    assert not said and latest.read_text() == "step_000002\n"


def test_a_new_run_does_not_replace_a_copy(run, url):
    refuse_copy(url, run)
    copied(run, url, 1)
    shutil.rmtree(run)
    with pytest.raises(MachineError, match="may hold a run of this name; try "):
        refuse_copy(url, run, lambda url, name: 1 / 0)
    with pytest.raises(UserError, match=r"^resume: .*/one already holds a checkpoint \(step_000001\); give"):
        refuse_copy(url, run)


def away(url, name):
    raise ConnectionError("nobody answers")


def test_a_store_that_is_away_lets_no_damaged_checkpoint_be_passed_over(run, url):
    copied(run, url, 1)
    folder = run / "checkpoints/step_000001"

    with pytest.raises(MachineError, match=r"is damaged, and its copy .*nobody answers.*try again"):
        repair_checkpoint(url, folder, away)
    assert repair_checkpoint(url, folder) and verify(folder) is None


def test_a_store_that_cannot_be_read_starts_nothing_from_scratch(run, url):
    with pytest.raises(MachineError, match=r"cannot be read \(nobody answers\), and .* holds no checkpoint"):
        restore_lost(url, run, away)


def test_a_store_that_hangs_is_not_waited_for_after_a_request_to_stop(run, url):
    hangs = threading.Event()
    write_checkpoint(run, 1)
    mirror = Mirror(url, run, print, SOON, lambda *_: hangs.wait(20))
    mirror._waiting.clear()
    began = time.monotonic()
    assert mirror.close(60, lambda: True) is None and time.monotonic() - began < 5
    hangs.set()


RELATIVE = ["file://backup/runs", "file:backup", "s3:///folder"]


@pytest.mark.parametrize(
    "url", ["", "bucket/folder", "s4://bucket", "s3://", "file://", "http://a/b", *RELATIVE]
)
def test_urls_that_are_refused(url):
    with pytest.raises(UserError, match=r"^checkpoint\.mirror: .* is not valid; give a URL such as s3://"):
        check_mirror(url)


class Known:
    """A mirror in which some checkpoints are safe."""

    def __init__(self, *safe):
        self.safe, self.lines, self.report = safe, [], lambda line: self.lines.append(line)

    def is_safe(self, folder):
        return int(folder.name[5:]) in self.safe


def pruned(run, monkeypatch, free, keep_last, *safe):
    """Five checkpoints of which those in *safe* are copied, pruned; the steps that stay, and lines.

    Args:
        free: called, gives the GiB that are free.
    """
    for step in range(1, 6):
        write_checkpoint(run, step)
    config = CheckpointConfig(keep_last=keep_last, mirror="file:///nowhere")
    session = SimpleNamespace(
        run=SimpleNamespace(folder=run, checkpoint=config), world=SimpleNamespace(is_main=True)
    )
    hook = MirrorHook(session)
    hook._mirror, hook._newest = Known(*safe), 5
    store = CheckpointStore(run, config, alone())
    monkeypatch.setattr(
        hook_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free(store) * 2**30)
    )
    store._prune(5, hook.may_prune)
    return store.steps(), hook._mirror.lines


@pytest.mark.parametrize(
    ("safe", "free", "kept"),
    [
        ((1, 2, 3, 4), 10, [4, 5]),  # all copied: as without a mirror
        ((), 10, [1, 2, 3, 4, 5]),
        ((1, 3), 10, [2, 4, 5]),
        ((), 9.9, [4, 5]),  # no room: the newest two stay
        ((1,), 9.9, [4, 5]),
    ],
)
def test_a_checkpoint_goes_when_its_copy_is_safe(run, monkeypatch, safe, free, kept):
    full = free < 10
    steps, lines = pruned(run, monkeypatch, lambda store: free, 1 if full else 2, *safe)
    assert steps == kept and len(lines) == (3 - len(safe) if full else 0)


def test_only_as_many_go_as_make_room(run, monkeypatch):
    steps, _ = pruned(run, monkeypatch, lambda store: 10 if len(store.steps()) < 5 else 0, 1)
    assert steps == [2, 3, 4, 5]


def test_what_was_not_copied_stays_when_the_hook_has_ended(run, monkeypatch):
    """The thread that deletes may outlive it."""
    session = SimpleNamespace(
        run=SimpleNamespace(folder=run, checkpoint=CheckpointConfig(mirror="file:///nowhere")),
        world=SimpleNamespace(is_main=True),
    )
    hook = MirrorHook(session)
    hook._mirror = Known(1)
    hook._mirror.close = lambda give_up: None
    hook.close()
    assert [hook.may_prune(write_checkpoint(run, step)) for step in (1, 2)] == [True, False]
    assert hook.end(lambda: False) == []
