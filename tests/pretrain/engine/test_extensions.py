"""A lock in an extension's folder: waited for while somebody compiles, removed when nobody does."""

import os
import subprocess
import sys
import threading
import time

import pytest

from pretrain.engine import extensions
from pretrain.engine.extensions import SignedBaton, prepare_extension, wait_for_lock
from tests.helpers.launch import ROOT

HOLDER = """
import os, sys
from pretrain.engine.extensions import SignedBaton
baton = SignedBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.readline()
baton.release()
"""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Where torch puts the lock of an extension called x; waiting is told at once."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(extensions, "SAY_SECONDS", 0.0)
    (tmp_path / "x").mkdir()
    return tmp_path / "x" / "lock"


def waiting(lock):
    thread = threading.Thread(target=wait_for_lock, args=(lock.parent,), daemon=True)
    thread.start()
    return thread


def test_a_lock_of_a_killed_process_goes_and_one_of_a_living_process_stays(lock, capsys):
    command, pipe = [sys.executable, "-c", HOLDER, str(lock)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        thread = waiting(lock)
        thread.join(1.0)
        assert thread.is_alive() and lock.exists(), "it compiles"
        holder.kill()
        holder.wait()
        thread.join(10)
    assert not thread.is_alive() and not lock.exists()
    said = capsys.readouterr().err.splitlines()
    assert (
        len(said) == 2
        and f"waiting for a compilation that holds {lock}; if none is running, delete" in said[0]
    )
    assert f"removed {lock}" in said[1] and "its process is gone" in said[1]


def test_it_is_waited_for_until_it_is_released(lock, capsys):
    baton = SignedBaton(str(lock))
    assert baton.try_acquire() and not SignedBaton(str(lock)).try_acquire()
    thread = waiting(lock)
    thread.join(0.5)
    assert thread.is_alive()
    baton.release()
    thread.join(10)
    assert not thread.is_alive() and "removed" not in capsys.readouterr().err


def test_a_compiler_that_outlived_its_parent_is_waited_for(lock):
    lock.write_text(f"{extensions.socket.gethostname()} 4000000")
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as compiler:
        thread = waiting(lock)
        thread.join(0.7)
        assert thread.is_alive() and lock.exists()
        compiler.kill()
        compiler.wait()
        thread.join(10)
    assert not lock.exists()


@pytest.mark.parametrize("text", ["", "another-host 17", "\0"])
def test_a_lock_of_another_machine_counts_by_what_has_changed_beside_it(lock, text):
    lock.write_text(text)
    thread = waiting(lock)
    thread.join(0.5)
    assert thread.is_alive() and lock.exists()
    old = time.time() - extensions.STILL_SECONDS - 10
    for path in (lock, lock.parent):
        os.utime(path, (old, old))
    thread.join(10)
    assert not lock.exists()


def test_before_an_extension_is_loaded(lock, monkeypatch):
    monkeypatch.setattr(extensions.cpp_extension, "FileBaton", extensions.FileBaton)
    lock.write_text(f"{extensions.socket.gethostname()} 4000000")
    prepare_extension("x")
    assert not lock.exists() and extensions.cpp_extension.FileBaton is SignedBaton
    assert isinstance(extensions.FileBaton(str(lock)), extensions.FileBaton)
