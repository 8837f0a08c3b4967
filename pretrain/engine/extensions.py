"""Removes the lock that a killed compilation of a DeepSpeed extension leaves behind.

torch keeps a file ``lock`` in an extension's folder while it compiles there. A process that finds one waits
until it goes, for ever and without a message. Here a lock names its holder, and one that no process holds is
removed.
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
"""A lock of another machine, or of a program that did not sign it, counts as abandoned when nothing in its
folder has changed for this long: an extension is a few files of a minute or less each."""


class SignedBaton(FileBaton):
    """torch's lock file, in which host and process of its holder are written."""

    def try_acquire(self) -> Any:
        acquired = super().try_acquire()
        if acquired:
            with suppress(OSError):  # the compiler reports a full disk
                Path(self.lock_file_path).write_text(f"{socket.gethostname()} {os.getpid()}")
        return acquired


def prepare_extension(name: str) -> None:
    """Clear the lock of an extension that all ranks are about to load, and to compile if need be. Collective.

    While another process compiles it this waits, and reports that once. One rank of each machine removes an
    abandoned lock before any rank begins, so that no lock of this session is removed.
    """
    cpp_extension.FileBaton = SignedBaton  # type: ignore[misc]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        wait_for_lock(Path(cpp_extension._get_build_directory(name, verbose=False)))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


def wait_for_lock(folder: Path) -> None:
    """Wait until an extension's *folder* has no lock; one that no process holds is removed."""
    lock = folder / "lock"
    began, reported = time.monotonic(), False
    while lock.exists():
        reason = _why_abandoned(lock)
        if reason is not None:
            lock.unlink(missing_ok=True)
            _say(f"removed {lock}, which a compilation left that did not end ({reason})")
            return
        if not reported and time.monotonic() - began >= SAY_SECONDS:
            reported = True
            _say(f"waiting for a compilation that holds {lock}; if none is running, delete that file")
        time.sleep(0.2)


def _why_abandoned(lock: Path) -> str | None:
    """Why a lock counts as abandoned; None where a process holds it or may hold it."""
    try:
        host, *_ = [*lock.read_text(errors="replace").split(), ""]
        # A folder's modification time is that of the last file added or removed.
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
    seconds = time.time() - changed
    return f"nothing has changed beside it for {seconds:.0f} s" if seconds > STILL_SECONDS else None


def _in_use(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, or compiles in its folder (a parent may have
    died)."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.cwd() == str(lock.parent.resolve()):
                return True
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False


def _say(text: str) -> None:
    print(f"DeepSpeed's extension: {text}", file=sys.stderr, flush=True)
