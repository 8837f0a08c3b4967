"""Writes an output folder atomically, and replaces an existing one only when the user asks and nothing of his
is lost: an export lists its files with their hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.declared import from_dict
from model.errors import UserError
from pretrain.utils.files import (
    atomic_folder,
    file_entry,
    refuse_other_kind,
    remove_leftovers,
    restore_folder,
    temporary_path,
)
from pretrain.utils.parsing import read_json

WRITTEN = "export.json"
"""The list of what an export wrote: size and hash by the file's name."""


@contextmanager
def new_folder(out: Path, overwrite: bool = False, kind: str = "model") -> Iterator[Path]:
    """Yield a folder to fill; it becomes *out* when the block succeeds, and is removed when it fails.

    Of several processes that write to *out* at once, one succeeds; the others raise UserError at their end.

    Args:
        overwrite: whether an exported model at *out* may be replaced.
        kind: as of check_output.

    Raises:
        UserError: as check_output; a file cannot be written, or read in the block.
    """
    try:
        restore_folder(out)
        check_output(out, overwrite, kind)
        remove_leftovers(out.parent)
        with atomic_folder(out, temporary_path(out), replace=overwrite) as partial:
            yield partial
            if overwrite:
                check_output(out, overwrite)  # what was put there meanwhile
    except OSError as error:
        raise UserError(f"out: cannot write {str(out)!r} ({error}); nothing was written") from error


def check_output(out: Path, overwrite: bool, kind: str = "model") -> None:
    """Reject a folder that exists, unless *overwrite* is given and it holds just what an export wrote.

    Args:
        kind: what is to be made there, a key of pretrain.utils.files.KINDS.

    Raises:
        UserError: it names the first file that would be lost.
    """
    if not os.path.lexists(out):
        return
    refuse_other_kind(out, kind, "out")
    if not (overwrite and out.is_dir()):
        raise UserError(
            f"out: {str(out)!r} exists already; give another folder (--overwrite replaces exported models, "
            "nothing else)"
        )
    kept = f"out: {str(out)!r} is not replaced"
    if not os.path.lexists(out / WRITTEN):
        for path in out.iterdir():
            raise UserError(
                f"{kept}: it holds {path.name!r}, but no {WRITTEN}, an export's list of its files"
            )
        return
    entries = _read_written(out, kept)
    folders = {parent.as_posix() for name in entries for parent in Path(name).parents}
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if name == WRITTEN or (name in folders and path.is_dir()):
            continue
        regular = path.is_file() and not path.is_symlink()
        if name not in entries or not regular or file_entry(path) != entries[name]:
            how = "was changed since the export" if name in entries else "was not written by the export"
            raise UserError(f"{kept}: {name!r} in it {how}; move it elsewhere")


def is_as_written(folder: Path, *names: str) -> bool:
    """Whether an export wrote these files, and they are unchanged."""
    try:
        entries = _read_written(folder, str(folder))
        return all(file_entry(folder / name) == entries.get(name) for name in names)
    except (UserError, OSError):
        return False


def _read_written(folder: Path, where: str) -> dict[str, Any]:
    listed = read_json(folder / WRITTEN, where)
    entries: dict[str, Any] = from_dict(dict[str, dict[str, int | str]], listed, f"{where}: {WRITTEN}")
    return entries


def list_files(folder: Path) -> None:
    """Write the list of the files in *folder*, the whole of an export."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    entries = {path.relative_to(folder).as_posix(): file_entry(path) for path in files}
    (folder / WRITTEN).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
