"""Writes files so that a crash leaves the old one or the new one, and hashes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash


def file_entry(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as the manifest has them."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def write_synced(path: Path, text: str) -> None:
    """Write a text file and force it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Force a file that was written by other means to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (renames, new files) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
