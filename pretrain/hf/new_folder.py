"""Writes an output folder atomically, and replaces an existing one only when the user asks."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import UserError
from pretrain.utils.files import atomic_folder, own_path, remove_leftovers, restore_folder


@contextmanager
def new_folder(out: Path, needed: int, overwrite: bool | None) -> Iterator[Path]:
    """Yield a folder to fill; it becomes *out* when the block succeeds, and is removed when it fails.

    Of several processes that write to *out* at once, one succeeds; the others raise UserError at their end.

    Args:
        needed: bytes that will be written.
        overwrite: whether an exported model at *out* may be replaced; None: nothing may.

    Raises:
        UserError: *out* exists and is not to be overwritten, the disk is too small, full or not writable, or
            a file that is read in the block cannot be.
    """
    partial = own_path(out)
    try:
        restore_folder(out)
        _check_free(out, overwrite)
        remove_leftovers(out.parent)
        with atomic_folder(out, partial, replace=bool(overwrite)):
            free = shutil.disk_usage(partial).free
            if free < needed:
                space = f"{needed / 1e6:,.0f} MB in {str(out.parent)!r}, {free / 1e6:,.0f} MB are free"
                raise UserError(f"out: no room for {space}")
            yield partial
    except OSError as error:
        raise UserError(_error_message(error, out, partial)) from error


def _error_message(error: OSError, out: Path, partial: Path) -> str:
    """The message for an error in writing *out*, or in reading something else."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return f"out: {str(out)!r} was written by another process in the meantime; give another folder"
    error_paths = [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]
    output_paths = [
        path
        for path in error_paths
        if path.is_relative_to(partial) or partial.is_relative_to(path) or path == out
    ]
    # Copying names the source.
    if error_paths and not output_paths and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"convert: cannot read {error_paths[0]}: {reason}; nothing was written to {out}"
    return f"out: cannot write {(output_paths or [out])[0]}: {reason}"


def _check_free(out: Path, overwrite: bool | None) -> None:
    if out.exists() and not overwrite:
        advice = "" if overwrite is None else ", or --overwrite to replace it"
        raise UserError(f"out: {str(out)!r} exists already; give another folder{advice}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "config.json").is_file())):
        raise UserError(
            f"out: {str(out)!r} is not an exported model and is not overwritten; give another folder"
        )
