"""Text from pipes, which can be read only once: it is copied first, and then read as any file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from model.errors import escape_controls
from pretrain.prepare.progress import Report
from pretrain.utils.files import CHUNK_BYTES

_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


@contextlib.contextmanager
def pipes_as_files(paths: Sequence[str], folder: Path, report: Report) -> Iterator[list[str]]:
    """Yield *paths* with a file in *folder* in place of each pipe. *folder* is removed afterwards.

    The same text gives the same corpus, and finds the work of an interrupted command done.

    Raises:
        OSError: a pipe cannot be read, or the disk is full.
    """
    try:
        yield [_copy_pipe(path, folder / f"pipe{number}", report) for number, path in enumerate(paths)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_pipe(path: str, copy: Path, report: Report) -> str:
    kind = stat.S_IFMT(Path(path).stat().st_mode) if Path(path).exists() else None
    # Other processes have no such descriptors, or others, even if they are of files.
    if kind != stat.S_IFIFO and not (kind == stat.S_IFREG and path.startswith(_STREAMS)):
        return path
    copy = copy.with_name(copy.name + "".join(Path(path).suffixes))
    copy.parent.mkdir(parents=True, exist_ok=True)
    report(escape_controls(f"copying {path}, which can be read only once, to {copy}"))
    digest = hashlib.sha256()
    with Path(path).open("rb") as source, copy.open("wb") as target:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
    # A file is also identified by its time: here the time follows from the content.
    os.utime(copy, ns=(0, int.from_bytes(digest.digest()[:7], "big")))
    return str(copy)
