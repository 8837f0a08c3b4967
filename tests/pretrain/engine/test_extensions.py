"""A lock in an extension's folder: waited for while somebody compiles, free when nobody does."""

import subprocess
import sys
import threading

from torch.utils import cpp_extension

from pretrain.engine.extensions import ProcessLock, lock_by_process
from tests.helpers.launch import ROOT

HOLDER = """
import sys
from pretrain.engine.extensions import ProcessLock
assert ProcessLock(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.readline()
"""


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


def test_torch_takes_it(monkeypatch):
    monkeypatch.setattr(cpp_extension, "FileBaton", None)
    lock_by_process()
    assert cpp_extension.FileBaton is ProcessLock
