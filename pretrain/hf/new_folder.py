"""Writes an output folder atomically, and replaces an existing one only when the user asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import UserError
from pretrain.utils.files import atomic_folder, own_path, remove_leftovers, restore_folder


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to fill; it becomes *out* when the block succeeds, and is removed when it fails.

    Of several processes that write to *out* at once, one succeeds; the others raise UserError at their end.

    Args:
        overwrite: whether an exported model at *out* may be replaced.

    Raises:
        UserError: *out* exists and is not to be overwritten, or a file cannot be written, or read in the
            block.
    """
    try:
        restore_folder(out)
        exported = out.is_dir() and (not any(out.iterdir()) or (out / "config.json").is_file())
        if out.exists() and not (overwrite and exported):
            raise UserError(
                f"out: {str(out)!r} exists already; give another folder (--overwrite replaces exported "
                "models, nothing else)"
            )
        remove_leftovers(out.parent)
        with atomic_folder(out, own_path(out), replace=overwrite) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"out: cannot write {str(out)!r} ({error}); nothing was written") from error
