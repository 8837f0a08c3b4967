import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from pretrain.utils import files
from pretrain.utils.files import (
    atomic_file,
    atomic_folder,
    open_regular,
    put_folder,
    read_regular,
    temporary_path,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def folder_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "text").write_text(text)
    return path


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path):
    write_atomically(tmp_path / "a", "old")
    with pytest.raises(ValueError, match="half-way"), atomic_file(tmp_path / "a") as partial:
        partial.write_text("ne")
        assert (tmp_path / "a").read_text() == "old"
        raise ValueError("half-way")
    assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_errors_name_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        write_atomically(tmp_path / "no" / "a", "x")
    assert missing.value.filename == str(tmp_path / "no" / "a")
    with pytest.raises(OSError) as full, atomic_file(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert full.value.filename == str(tmp_path / "a")


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events: list[tuple[str, str]] = []
    sync, rename, replace = files.sync, Path.rename, Path.replace
    monkeypatch.setattr(files, "sync", lambda path: (events.append(("sync", path.name)), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append(("name", b.name)), rename(a, b)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append(("name", b.name)), replace(a, b)))
    write_atomically(tmp_path / "a", "x")
    assert events == [("sync", temporary_path(tmp_path / "a").name), ("name", "a"), ("sync", tmp_path.name)]
    events.clear()
    with atomic_folder(tmp_path / "out") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("x")
    before = [("sync", "file"), ("sync", "inner"), ("sync", ".writing_out"), ("name", "out")]
    assert events == [*before, ("sync", tmp_path.name)]


KILLED = """
import os, signal, sys
from pathlib import Path
from pretrain.utils.files import atomic_file, atomic_folder, temporary_path
target = Path(sys.argv[1])
if sys.argv[2] == "file":
    with atomic_file(target) as partial:
        partial.write_text("new")
        os.kill(os.getpid(), signal.SIGKILL)
with atomic_folder(target, temporary_path(target) if sys.argv[2] == "own" else None) as partial:
    (partial / "text").write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["file", "own"])
def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_are_not(tmp_path, kind):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a"), kind], check=False)
    assert killed.returncode == -signal.SIGKILL
    ours = temporary_path(tmp_path / "b")
    ours.write_text("half")
    elsewhere = tmp_path / ".c.another-host-1"
    elsewhere.write_text("half")
    (tmp_path / f"a-{os.uname().nodename}-12").write_text("no leftover: no dot before the host")
    assert len(names(tmp_path)) == 4
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([ours.name, elsewhere.name, f"a-{os.uname().nodename}-12"])
    files.remove_leftovers(tmp_path / "missing")


def test_a_killed_write_leaves_the_old_folder_and_the_next_one_starts_afresh(tmp_path):
    folder_with(tmp_path / "out", "old")
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), "folder"], check=False)
    assert names(tmp_path) == [".writing_out", "out"] and (tmp_path / "out" / "text").read_text() == "old"
    with atomic_folder(tmp_path / "out") as partial:
        assert names(partial) == []
        (partial / "other").write_text("new")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["other"]


def test_after_an_error_the_old_folder_is_there_and_nothing_else(tmp_path):
    folder_with(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as partial:
        (partial / "text").write_text("ne")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "text").read_text() == "old"


def test_a_replacement_cut_between_its_renames_is_undone(tmp_path, monkeypatch):
    old, new = folder_with(tmp_path / "out", "old"), folder_with(tmp_path / "new", "new")
    rename = Path.rename

    def fail_for_new(path, target):
        if path == new:
            raise OSError(5, "Input/output error", str(path))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail_for_new)
        with pytest.raises(OSError, match="Input/output"):
            put_folder(new, old)
    assert names(tmp_path) == ["new", "out"] and (old / "text").read_text() == "old"
    old.rename(tmp_path / ".replaced_out")  # where a kill at that moment leaves it
    files.restore_folder(old)
    assert names(tmp_path) == ["new", "out"] and (old / "text").read_text() == "old"
    folder_with(tmp_path / ".replaced_out", "older")  # and after the second rename
    put_folder(new, old)
    assert names(tmp_path) == ["out"] and (old / "text").read_text() == "new"


def test_a_folder_that_is_not_to_be_replaced_stays(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out", replace=False) as partial:  # an empty one is not an obstacle
        (partial / "text").write_text("first")
    with (
        pytest.raises(FileExistsError, match="is there already"),
        atomic_folder(tmp_path / "out", temporary_path(tmp_path / "out"), replace=False) as partial,
    ):
        (partial / "text").write_text("second")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "text").read_text() == "first"


def test_several_processes_write_one_file_and_every_reader_sees_a_whole_one(tmp_path):
    path, content = tmp_path / "a", "x" * 100_000
    code = (
        "import sys; from pathlib import Path; from pretrain.utils.files import write_atomically\n"
        f"for _ in range(40): write_atomically(Path(sys.argv[1]), sys.argv[2] * {len(content)})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "ab"]
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers) and time.monotonic() < deadline:
        if path.exists():
            text = path.read_text()
            assert len(text) == len(content) and len(set(text)) == 1
    assert [writer.wait(60) for writer in writers] == [0, 0] and names(tmp_path) == ["a"]


def test_entry_of_a_file(tmp_path):
    data = bytes(range(256)) * 40_000  # more than one chunk
    (tmp_path / "a").write_bytes(data)
    expected = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    assert len(data) > files.CHUNK_BYTES and files.file_entry(tmp_path / "a") == expected


def test_a_folder_that_cannot_be_copied_names_the_file_and_the_reason(tmp_path, monkeypatch):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (source / name).write_text(name)
    files.copy_folder(source, tmp_path / "whole")
    assert (tmp_path / "whole" / "inner" / "b").read_text() == "inner/b"

    def full(one, other):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(other))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        files.copy_folder(source, tmp_path / "cut")
    assert type(caught.value) is OSError and caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).startswith(str(tmp_path / "cut")) and "(" not in str(caught.value)


def test_what_may_have_no_end_is_not_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert read_regular(tmp_path / "link", 4) == read_regular(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="has 3 bytes, more than the 2 allowed"):
        read_regular(tmp_path / "link", 2)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "loop", tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(OSError) as refused:
            open_regular(path)
        assert refused.value.filename == str(path)
