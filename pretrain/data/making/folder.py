"""The folder of a new corpus: whether it is there already, and the lock for writing it."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.making.progress import Report
from pretrain.data.meta import META_FILE, CorpusMeta
from pretrain.utils.files import atomic_folder


def already_there(out: Path, request: dict[str, Any]) -> bool:
    """True if *out* holds the requested corpus, False if it is free; UserError if it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        present = CorpusMeta.read(out).request or {}
    except UserError:
        raise UserError(f"out: {str(out)!r} exists and is not a corpus; valid: a new folder") from None
    if present == request:
        return True
    differing = ", ".join(key for key in request | present if present.get(key) != request.get(key))
    raise UserError(
        f"out: {str(out)!r} holds another corpus (differs in {differing}); remove it or choose a new folder"
    )


@contextlib.contextmanager
def to_be_made(out: Path, request: dict[str, Any], report: Report) -> Iterator[bool]:
    """Yield whether the requested corpus is still to be made in *out*, holding its lock if so.

    The kernel frees the lock when its holder ends in any way.

    Raises:
        UserError: *out* holds something else.
    """
    if already_there(out, request):
        yield False
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as stream:
        # A file system may have no locks: renaming is still atomic, at worst the work is done twice.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another process that prepares {out}")
                fcntl.flock(stream, fcntl.LOCK_EX)
        yield not already_there(out, request)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes *out*. The caller holds the lock."""
    # One name per machine: an existing folder was left by a process that died, since we hold the lock.
    partial = out.parent / f".{out.name}.partial-{socket.gethostname()}"
    try:
        with atomic_folder(out, partial, replace=False):
            yield partial
    except FileExistsError:
        # Without locks another machine may have finished first; its folder has the same content.
        if not (out / META_FILE).is_file():
            raise
