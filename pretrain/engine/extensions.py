"""What DeepSpeed compiles at its first use, and the lock that a compilation leaves when it is killed.

torch keeps a file ``lock`` in an extension's folder while it compiles there; who finds one waits until it goes, for
ever and without a word. Here a lock says whose it is, and one that nobody holds is removed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

SAY_SECONDS = 5.0
RELEASE_SECONDS = 0.2  # torch closes the file first and removes it then
STILL_SECONDS = 300.0
"""A lock of another machine, or of a program that did not sign it, counts as left when nothing in its folder has
changed for so long: an extension is a few files of a minute or less each."""


class SignedBaton(FileBaton):
    """torch's lock file, with host and process of its holder inside."""

    def try_acquire(self) -> Any:
        acquired = super().try_acquire()
        if acquired:
            with suppress(OSError):  # a full disk is the compiler's to report
                Path(self.lock_file_path).write_text(f"{socket.gethostname()} {os.getpid()}")
        return acquired


def prepare_extension(name: str) -> None:
    """Make way for an extension that is about to be loaded, and compiled if need be, on all ranks. Collective.

    Waits while somebody else compiles it, and says so once; a lock that was left is removed by one rank of each machine
    before any rank begins, so that none is removed that this session took.
    """
    cpp_extension.FileBaton = SignedBaton  # type: ignore[misc]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        wait_for_lock(Path(cpp_extension._get_build_directory(name, verbose=False)))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


def wait_for_lock(folder: Path) -> None:
    """Return when no lock is in an extension's *folder*; one that nobody holds is removed."""
    lock = folder / "lock"
    began, said = time.monotonic(), False
    while lock.exists():
        why = _left(lock)
        if why is not None:
            lock.unlink(missing_ok=True)
            _say(f"removed {lock}, which a compilation left that did not end ({why})")
            return
        if not said and time.monotonic() - began >= SAY_SECONDS:
            said = True
            _say(f"waiting for a compilation that holds {lock}; if none is running, delete that file")
        time.sleep(0.2)


def _left(lock: Path) -> str | None:
    """Why nobody holds a lock any more; None where somebody does or may."""
    try:
        host, *_ = [*lock.read_text(errors="replace").split(), ""]
        # A folder's own time is that of the last file that came or went.
        changed = max(path.stat().st_mtime for path in (lock.parent, *lock.parent.iterdir()))
    except OSError:  # released in this moment
        return None
    if _in_use(lock):
        return None
    time.sleep(RELEASE_SECONDS)
    if not lock.exists():
        return None
    if host == socket.gethostname():
        return "its process is gone"
    still = time.time() - changed
    return f"nothing has changed beside it for {still:.0f} s" if still > STILL_SECONDS else None


def _in_use(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, or compiles in its folder (a parent may have died)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == str(lock.parent.resolve()):
                return True
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False


def _say(text: str) -> None:
    print(f"DeepSpeed's extension: {text}", file=sys.stderr, flush=True)
