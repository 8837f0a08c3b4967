"""A folder of the user's choice that appears whole or not at all, and replaces nothing unasked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import UserError
from pretrain.utils.files import atomic_folder, restore_folder


@contextmanager
def new_folder(out: Path, needed: int, overwrite: bool | None) -> Iterator[Path]:
    """A folder to fill that becomes *out* when the block ends well, and is removed when it does not.

    Args:
        needed: bytes that will be written.
        overwrite: whether an exported model at *out* may be replaced; None: nothing may.

    Raises:
        UserError: *out* exists and is not to be overwritten, or the disk is too small, full or not writable.
    """
    try:
        restore_folder(out)
        restore_folder(out, out.with_name(f".{out.name}.old"))  # the name that older versions gave
        _check_free(out, overwrite)
        with atomic_folder(out, out.with_name(f".{out.name}.writing")) as partial:
            free = shutil.disk_usage(partial).free
            if free < needed:
                raise UserError(
                    f"out: no room for {needed / 1e6:,.0f} MB in {str(out.parent)!r}, {free / 1e6:,.0f} MB are free"
                )
            yield partial
    except OSError as error:
        raise UserError(f"out: cannot write {error.filename or out}: {error.strerror or error}") from error


def _check_free(out: Path, overwrite: bool | None) -> None:
    if out.exists() and not overwrite:
        advice = "" if overwrite is None else ", or --overwrite to replace it"
        raise UserError(f"out: {str(out)!r} exists already; give another folder{advice}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "config.json").is_file())):
        raise UserError(f"out: {str(out)!r} is no exported model and is not overwritten; give another folder")
