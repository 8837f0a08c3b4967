"""Locks a DeepSpeed extension's folder while it is compiled, so that a killed compilation leaves no lock.

torch's own lock is the existence of a file: a process that finds one left behind waits for ever, without a
message. Here the operating system holds the lock, and releases it with its process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.utils import cpp_extension

from model.errors import UserError
from pretrain.utils.files import open_lock, wait_for_lock

MOST_SECONDS = 900.0
"""A compilation takes about a minute; each rank of a node waits for those before it."""


class ProcessLock:
    """Takes the place of torch.utils.file_baton.FileBaton; the processes compile one after the other.

    All but the first find everything compiled.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def try_acquire(self) -> bool:
        """Take the lock, as soon as no process holds it.

        Raises:
            UserError: another process has held it for MOST_SECONDS.
            OSError: it belongs to another user.
        """
        self._file = open_lock(self.path)
        if not wait_for_lock(self._file, self._note_waiting, MOST_SECONDS):
            raise UserError(
                f"TORCH_EXTENSIONS_DIR: another process has held {self.path} for {MOST_SECONDS / 60:g} "
                "minutes; end it, or give another folder"
            )
        return True

    def _note_waiting(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for a compilation that holds {self.path}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Release the lock."""
        Path(self.path).unlink(missing_ok=True)  # programs with torch's lock would wait
        os.close(self._file)


def lock_by_process() -> None:
    """Let torch lock with these the extensions that it compiles from now on."""
    cpp_extension.FileBaton = ProcessLock  # type: ignore[misc, assignment]
