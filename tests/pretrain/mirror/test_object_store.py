"""Copies that are cut off at any moment: the store still holds a whole checkpoint of the newest step.

In a folder, whose files are visible while they are written, and in a store whose objects appear when they are
complete, as those of S3 and GCS do.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
from fsspec.core import url_to_fs

from pretrain.checkpoint.manifest import MANIFEST, Entry
from pretrain.mirror import object_store
from pretrain.mirror.copies import RECORD, Mirror, restore_lost
from tests.helpers.marks import slow
from tests.pretrain.mirror.test_copies import SOON, contents, write_checkpoint

KILLS = 12
TRACED = ("copies.py", "object_store.py", "files.py", "shutil.py", "local.py", "memory.py", "spec.py")


class Killed(BaseException):
    """Stands for a process that ends."""


def interrupted(call, line, end):
    """Call something, and *end* it at the n-th line of the code that copies; the lines that were reached."""
    reached = 0

    def trace(frame, event, _):
        nonlocal reached
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            reached += 1
            if reached == line:
                sys.settrace(None)
                end()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Killed:
        pass
    finally:
        sys.settrace(before)
    return reached


def end_by_error():
    raise Killed


def in_a_process_that_is_killed(call, line):
    """No finally block runs, and nothing is flushed."""
    child = os.fork()
    if not child:
        interrupted(call, line, lambda: os._exit(9))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


class Copied:
    """A run whose steps 20, 40 and 60 are in a store, and which was lost and fetched from there."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.run = url, folder, folder / "one"
        self.files, self.root = url_to_fs(url, skip_instance_cache=True)
        self.run.mkdir(parents=True)
        for step in (20, 40, 60):
            write_checkpoint(self.run, step)
        assert Mirror(url, self.run, print, SOON).close() is None
        shutil.rmtree(self.run)
        assert "step_000060 was fetched" in restore_lost(url, self.run)[0]
        self.before = self.objects()

    def objects(self) -> dict[str, bytes]:
        return {path: self.files.cat_file(path) for path in self.files.find(self.root)}

    def reset(self) -> None:
        self.files.rm(self.root, recursive=True)
        for path, content in self.before.items():
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(path, content)

    def copy(self) -> None:
        """What a session that knows nothing of the store's contents does."""
        mirror = Mirror.__new__(Mirror)
        mirror.url, mirror.run_folder, mirror._store, mirror._open = (
            self.url,
            self.run,
            None,
            object_store.Store,
        )
        mirror._ahead = 0
        mirror._copy("step_000060")

    def restored(self, name: str) -> dict[str, bytes]:
        """The newest checkpoint that comes back."""
        folder = self.folder / name / "one"
        notes = restore_lost(self.url, folder)
        assert len(notes) == 1 and "step_000060 was fetched" in notes[0]
        return contents(folder / "checkpoints/step_000060")


@pytest.fixture(params=["file", "memory"])
def copied(request, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 3000)
    url = f"file://{tmp_path}/mirror" if request.param == "file" else f"memory://{tmp_path.name}/mirror"
    made = Copied(url, tmp_path / "runs")
    yield made
    made.files.rm(made.root, recursive=True)


def test_what_was_fetched_is_not_copied_back(copied):
    mirror = Mirror(copied.url, copied.run, print, SOON, open_store=None)
    assert mirror.close() is None and mirror.is_safe(copied.run / "checkpoints/step_000060")
    assert copied.objects() == copied.before


def test_another_checkpoint_of_the_step_is_not_taken_for_the_one_that_was_copied(copied):
    """Also after a session that was killed before its mirror knew of it."""
    write_checkpoint(copied.run, 60, seed=1)
    names = []
    mirror = Mirror(copied.url, copied.run, print, SOON, lambda *_: names.append(1) or object_store.Store(*_))
    assert mirror.close() is None and names
    assert copied.restored("again") == contents(copied.run / "checkpoints/step_000060")


def test_what_the_store_has_is_left_alone(copied, monkeypatch):
    (copied.run / RECORD).unlink()
    written = []
    write = object_store.Store._write
    monkeypatch.setattr(
        object_store.Store, "_write", lambda *given: written.append(given[2]) or write(*given)
    )
    copied.copy()
    assert not [name for name in written if name.startswith("checkpoints/") and not name.endswith(MANIFEST)]


@pytest.mark.parametrize("recomputed", [False, True], ids=["the same", "another"])
@pytest.mark.parametrize("how", ["error", *slow(["kill"])])
def test_a_copy_that_is_cut_off_anywhere_leaves_the_newest_step_whole(copied, recomputed, how):
    if how == "kill" and copied.url.startswith("memory"):
        pytest.skip("it ends with its process")
    old = contents(copied.run / "checkpoints/step_000060")
    if recomputed:
        write_checkpoint(copied.run, 60, seed=1)
    new = contents(copied.run / "checkpoints/step_000060")
    lines = interrupted(copied.copy, -1, end_by_error)
    assert lines > 300 and copied.restored("whole") == new
    for line in random.Random(f"{how} {recomputed}").sample(range(1, lines), KILLS):
        copied.reset()
        if how == "kill":
            in_a_process_that_is_killed(copied.copy, line)
        else:
            interrupted(copied.copy, line, end_by_error)
        assert copied.restored(f"line {line}") in (old, new), f"cut off at line {line} of {lines}"
        copied.copy()  # the next session
        assert copied.restored(f"line {line}, next") == new


def test_an_error_while_it_is_read_leaves_an_object_as_it_was(copied):
    """fsspec completes an upload when its file is closed, whatever closes it."""

    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell():
                raise OSError("cut")
            return super().read(10)

    store = object_store.Store(copied.url, "one")
    for name in ("latest", f"checkpoints/step_000060/{MANIFEST}", "checkpoints/step_000060/new"):
        with pytest.raises(OSError, match="cut"):
            store._write(Failing(bytes(100)), name, Entry(100, "a"))
    objects = copied.objects()
    assert {path: objects[path] for path in objects if ".writing_" not in path} == copied.before
