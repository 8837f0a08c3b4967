"""A lock in an extension's folder: waited for while somebody compiles, free when nobody does."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest
from torch.utils import cpp_extension

from model.errors import UserError
from pretrain.engine import patches
from pretrain.engine.patches import ProcessLock, lock_by_process
from tests.helpers.launch import ROOT

HOLDER = """
import sys
from pretrain.engine.patches import ProcessLock
assert ProcessLock(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_lock_of_a_killed_process_is_free_and_one_of_a_living_process_is_waited_for(tmp_path, capsys):
    path, pipe = tmp_path / "lock", subprocess.PIPE
    lock = ProcessLock(str(path))
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        thread = threading.Thread(target=lock.try_acquire, daemon=True)
        thread.start()
        thread.join(1.0)
        assert thread.is_alive(), "it compiles"
        holder.kill()
        thread.join(10)
    assert not thread.is_alive() and path.exists()
    lock.release()
    assert not path.exists()
    assert capsys.readouterr().err == f"waiting for a compilation that holds {path}\n"


def test_a_lock_of_another_user_is_not_waited_for(tmp_path, monkeypatch):
    """Nor one that is never released, nor a link that leads elsewhere."""
    path = tmp_path / "lock"
    monkeypatch.setattr(patches, "MOST_SECONDS", 0.3)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"^TORCH_EXTENSIONS_DIR: another process has held .*lock for 0"):
            ProcessLock(str(path)).try_acquire()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            ProcessLock(str(path)).try_acquire()
    monkeypatch.undo()
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        ProcessLock(str(tmp_path / "link")).try_acquire()
    path.unlink()
    lock = ProcessLock(str(path))
    assert lock.try_acquire() and path.stat().st_mode & 0o077 == 0, "nobody else can open it"
    lock.release()


def test_torch_takes_it(monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", None)
    lock_by_process()
    assert cpp_extension.FileBaton is ProcessLock


def test_a_lock_that_its_holder_removes_is_not_taken(tmp_path):
    """Another process would lock a new file of that name at the same time."""
    path = tmp_path / "lock"
    first, second, third = (ProcessLock(str(path)) for _ in range(3))
    assert first.try_acquire()
    thread = threading.Thread(target=second.try_acquire, daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    first.release()
    thread.join(10)
    assert not thread.is_alive()
    with path.open() as there, pytest.raises(BlockingIOError):
        fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.release()
    assert third.try_acquire()
    third.release()
