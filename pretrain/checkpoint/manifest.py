"""Verifies a checkpoint against its manifest: the size and hash of every file."""

from __future__ import annotations

import json
from pathlib import Path

from pretrain.checkpoint.state import ENGINE_FOLDER, FORMAT, UNIVERSAL_FOLDER
from pretrain.utils.files import file_entry

MANIFEST = "manifest.json"


def verify(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint's files with its manifest.

    Args:
        folder: the checkpoint.
        part: which of *parts* equal shares of the files to read (each rank reads its own).

    Returns:
        None when it is valid, else what is wrong.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        # DeepSpeed's converter may have made universal/ from deepspeed/, which may then be deleted.
        converted = not (folder / ENGINE_FOLDER).is_dir() and (folder / UNIVERSAL_FOLDER).is_dir()
        files = {
            name: entry
            for name, entry in manifest["files"].items()
            if not (converted and name.startswith(f"{ENGINE_FOLDER}/"))
        }
        for name, entry in sorted(files.items())[part::parts]:
            path = folder / name
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, {entry['bytes']} were written"
            if file_entry(path) != entry:
                return f"{name} does not have the contents that were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None
