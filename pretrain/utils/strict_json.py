"""JSON that people write by hand: what Python's reader lets pass, hangs on or crashes over is refused in one line."""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from model.errors import UserError

LARGEST_FILE = 1 << 20
"""Bytes; a configuration is a few thousand."""
DIGITS = 40
"""Longest whole number that is read; turning thousands of digits into a number takes seconds."""

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist = 2, 3, 3
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: Any) -> str:
    """A value for an error message: one line, short whatever it holds, true, false and null as JSON spells them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _short.repr(value)


def read_json_object(path: str, field: str, hint: str = "") -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        field: begins every message, such as "ds_config".
        hint: added where the file cannot be read.

    Raises:
        UserError: no file, no regular file, larger than LARGEST_FILE, not UTF-8 (a byte order mark is passed over), no
            JSON, NaN or Infinity, a number no computer holds, a key given twice, nesting too deep, no object.
    """
    try:
        text = _read(Path(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{field}: cannot read {path!r} ({reason}){hint}") from None
    where = path if path.isprintable() else repr(path)
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_whole, parse_float=_number
        )
    except json.JSONDecodeError as error:
        raise UserError(f"{field}: {where} is not valid JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{field}: {where} is nested too deeply to be read") from None
    except ValueError as error:
        raise UserError(f"{field}: {where} {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{field}: {where} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _read(path: Path) -> str:
    status = path.stat()  # before opening: opening a pipe waits for someone to write
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("a folder")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > LARGEST_FILE:
        raise ValueError(f"{status.st_size:,} bytes; at most {LARGEST_FILE:,} are read")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"gives {shown(key)} twice")
        found[key] = value
    return found


def _constant(name: str) -> float:
    raise ValueError(f"holds {name}, which is no JSON number")


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"holds a number of {len(digits):,} digits; at most {DIGITS} are read")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"holds {shown(digits)}, which is too large for a number")
    return value
