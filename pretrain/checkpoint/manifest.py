"""A checkpoint's manifest: the size and hash of every file, compared before anything is loaded."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from model.declared import NonNegativeInt, declared, from_dict, to_dict
from model.errors import MachineError, UserError
from pretrain.utils.files import InnerPath, file_entry, open_regular, write_atomically
from pretrain.utils.parsing import read_json

MANIFEST = "manifest.json"
UNREADABLE = (
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
"""Errors of a file system that is away, of permissions, and of a process with too little of something."""


@declared()
class Entry:
    """What file_entry returns."""

    bytes: NonNegativeInt
    xxh3_128: str


@declared()
class Manifest:
    """The contents of a manifest."""

    files: Annotated[dict[InnerPath, Entry], Field(min_length=1)]
    """By name, relative to the checkpoint."""
    format: Literal[1] = 1
    """Of the checkpoint."""


def write_manifest(folder: Path, files: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest.

    Args:
        files: what file_entry returned, by the file's name.
    """
    content = to_dict(from_dict(Manifest, {"files": dict(files)}))
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1))


def verify(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint's files with its manifest.

    Args:
        folder: the checkpoint.
        part: which of *parts* equal shares of the files to read (each rank reads its own).

    Returns:
        None when it is valid, else what is wrong.

    Raises:
        MachineError: a file cannot be read now, which says nothing about its contents.
    """
    try:
        open_regular(folder / MANIFEST).close()
        manifest = from_dict(Manifest, read_json(folder / MANIFEST, "manifest"), MANIFEST)
        if "state.json" not in manifest.files:
            return f"{MANIFEST} does not list state.json"
        share = sorted(manifest.files.items())[part::parts]
        for name, entry in share:  # the sizes of all are known before any is read
            with open_regular(folder / name) as file:
                size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                return f"{name} has {size} bytes, {entry.bytes} were written"
        for name, entry in share:
            if file_entry(folder / name) != to_dict(entry):
                return f"{name} does not have the contents that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except UserError as error:
        return str(error)
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        if error.errno in UNREADABLE:
            raise MachineError(problem) from None
        return problem
    return None
