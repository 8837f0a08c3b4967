"""Files as a bad disk or a copy that broke off leaves them."""

from __future__ import annotations

import os
from pathlib import Path


def damage(path: Path, how: str) -> None:
    """Cut a file in half, remove it, or flip a bit in its middle: truncated, missing, flipped."""
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "missing":
        path.unlink()
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
