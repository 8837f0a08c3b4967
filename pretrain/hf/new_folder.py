"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import UserError
from pretrain.utils.files import sync_folder


@contextmanager
def new_folder(out: Path, needed: int, overwrite: bool | None) -> Iterator[Path]:
    """A folder to fill that becomes *out* when the block ends well, and is removed when it does not.

    Args:
        needed: bytes that will be written.
        overwrite: whether an exported model at *out* may be replaced; None: nothing may.

    Raises:
        UserError: *out* exists and is not to be overwritten, or the disk is too small, full or not writable.
    """
    if out.exists() and not overwrite:
        advice = "" if overwrite is None else ", or --overwrite to replace it"
        raise UserError(f"out: {str(out)!r} exists already; give another folder{advice}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "config.json").is_file())):
        raise UserError(f"out: {str(out)!r} is no exported model and is not overwritten; give another folder")
    partial = out.parent / f".{out.name}.writing"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < needed:
            raise UserError(
                f"out: no room for {needed / 1e6:,.0f} MB in {str(out.parent)!r}, {free / 1e6:,.0f} MB are free"
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        sync_folder(partial)
        old = out.parent / f".{out.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        sync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"out: cannot write {error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
