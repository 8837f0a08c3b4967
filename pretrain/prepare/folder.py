"""The output folder of a preparation: whether it exists, and the lock for writing it."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.corpus import META_FILE
from pretrain.prepare.progress import Progress, ProgressCallback


def parts_folder(out: Path) -> Path:
    """The folder of the finished parts of *out* until it is written."""
    return out.parent / f".{out.name}.partial-parts"


def already_there(out: Path, request: dict[str, Any]) -> bool:
    """True if *out* holds the requested corpus, False if it is free; UserError if it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        present_request = dict(json.loads((out / META_FILE).read_text("utf-8"))["request"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"out: {str(out)!r} exists and is not a corpus; valid: a new folder") from None
    if present_request == request:
        return True
    differing = ", ".join(
        key for key in request | present_request if present_request.get(key) != request.get(key)
    )
    raise UserError(
        f"out: {str(out)!r} holds another corpus (differs in {differing}); remove it or choose a new folder"
    )


@contextlib.contextmanager
def only_process(out: Path, report: ProgressCallback) -> Iterator[None]:
    """Hold the lock of *out*. The kernel frees it when its holder ends in any way: no stale lock can block."""
    with (out.parent / f".{out.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress(f"waiting for another process that prepares {out}"))
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: renaming is still atomic, at worst the work is done twice
        yield
