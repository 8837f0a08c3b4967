"""Reads JSON, YAML and numbers that users write: returns a value or raises a one-line UserError, always
quickly.

Libraries raise exceptions of many kinds (for brackets nested a thousand deep, a tag with an invalid value),
or never return. Here each is a UserError, and what is read is small enough to work with.
"""

from __future__ import annotations

import json
import re
import reprlib
import stat
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from model.declared import LARGEST_INTEGER
from model.errors import UserError, shown

LARGEST_FILE = 64 << 20
"""In bytes; a configuration has a few thousand, the index of a large model's files a few million."""
MOST_LEVELS = 50
"""Deepest nesting of lists and mappings."""
MOST_VALUES = 1_000_000
"""Limit for one file; a YAML alias counts as often as it is used."""

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist = 2, 3, 3
_short.maxstring = _short.maxother = _short.maxlong = 60


def read_text(path: Path, what: str, hint: str = "") -> str:
    """The text of a file that a user has written. Raises as read_json does, up to "not UTF-8"."""
    try:
        status = path.stat()  # before opening: opening a pipe waits for a writer
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("a folder")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > LARGEST_FILE:
            raise ValueError(f"{status.st_size:,} bytes; at most {LARGEST_FILE:,} are read")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{what}: {_name(path)} is not UTF-8 text{hint}") from None
    except OSError as error:
        raise UserError(f"{what}: cannot read {str(path)!r} ({error.strerror}){hint}") from None
    except ValueError as error:
        raise UserError(f"{what}: cannot read {str(path)!r} ({error}){hint}") from None


def read_json(path: Path, what: str, hint: str = "") -> Any:
    """The contents of a JSON file, which is named in messages as *what*; *hint* is added where it cannot be
    read.

    Raises:
        UserError: no file, not a regular file, larger than LARGEST_FILE, not UTF-8 (a byte order mark is
            skipped), not JSON, a key given twice, or numbers or nesting beyond the limits above.
    """
    return parse_json(read_text(path, what, hint), f"{what}: {_name(path)}")


def read_json_object(path: Path, what: str, hint: str = "") -> dict[str, Any]:
    """As read_json, for a file that must hold one object."""
    value = read_json(path, what, hint)
    if not isinstance(value, dict):
        raise UserError(f"{what}: {_name(path)} holds {shown_json(value)}; it must hold a JSON object, {{…}}")
    return value


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of *text* as JSON; error messages begin with *where*. Raises as read_json does."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({_reason(error)})") from None
    check_values(value, where)
    return value


def read_yaml(path: Path, what: str) -> Any:
    """The contents of a YAML file, by YAML's safe types alone. Raises as read_json does."""
    return parse_yaml(read_text(path, what), f"{what}: {path}")


def parse_yaml(text: str, where: str) -> Any:
    """The value of *text* as YAML; error messages begin with *where*. Raises as read_json does."""
    try:
        value = yaml.load(text, _ShallowLoader)
    # A tag such as !!int passes its value to Python unchecked, which may raise any of these.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML ({_reason(error)})") from None
    check_values(value, where)
    return value


def check_values(value: Any, where: str) -> None:
    """Refuse nesting and numbers that arithmetic or other readers cannot handle, NaN and infinities included.

    Raises:
        UserError: the message names the key, the number and what is valid.
    """
    pending: list[tuple[Any, str, int]] = [(value, "", 0)]
    count = 0
    while pending:
        item, key, level = pending.pop()
        count += 1
        if count > MOST_VALUES:
            raise UserError(f"{where} holds more than {MOST_VALUES:,} values; that is not a configuration")
        if level > MOST_LEVELS:
            raise UserError(f"{where} is nested more than {MOST_LEVELS} levels deep")
        if isinstance(item, dict):
            pending += [
                (inner, f"{key}.{shown(name, plain=True)}", level + 1) for name, inner in item.items()
            ]
        elif isinstance(item, list | tuple | set):
            pending += [(inner, key, level + 1) for inner in item]
        elif not is_finite(item):
            raise UserError(
                f"{where}{': ' + key[1:] if key else ''}: {shown(item)} is not valid; give a finite number "
                f"of at most {LARGEST_INTEGER:.1e}"
            )


def shown_json(value: Any) -> str:
    """A value for an error message: one line, short whatever it holds, true, false and null as JSON spells
    them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _short.repr(value)


def is_finite(value: Any) -> bool:
    """Whether arithmetic can use *value*: no NaN, infinity or overlong integer. Values that are not numbers
    pass."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    return not isinstance(value, float) or abs(value) < float("inf")


def parse_fraction(text: str) -> Fraction | None:
    """The exact value of ``0.3`` or ``1/3``; None for other text, and for numbers far out of any useful
    range.

    Fraction itself expands the exponent of 1e-99999999, which never ends.
    """
    text = text.strip()
    exponent = re.search(r"e([+-]?\d+)$", text, re.IGNORECASE)
    if len(text) > 40 or (exponent and abs(int(exponent[1])) > 30):
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


class _ShallowLoader(yaml.SafeLoader):
    """YAML's safe loader with a limit on nesting, at a depth that its recursion can still handle."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one level of lists and mappings."""
        self.level += 1
        if self.level > MOST_LEVELS:
            raise yaml.YAMLError(f"nested more than {MOST_LEVELS} levels deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self.level -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping, and refuse a key that it gives twice: YAML's own loader keeps the last
        value."""
        given: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                if (key.tag, key.value) in given:
                    raise yaml.YAMLError(f"it gives {shown(key.value)} twice in one mapping")
                given.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"it gives {shown(key)} twice in one object")
        mapping[key] = value
    return mapping


def _name(path: Path) -> str:
    return str(path) if str(path).isprintable() else repr(str(path))


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return shown(" ".join(str(error).split()) or type(error).__name__, limit=200, plain=True)
