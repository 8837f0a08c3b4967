"""Reads JSON, YAML and numbers that users write: returns a value or raises a one-line UserError, always
quickly.

Libraries raise exceptions of many kinds (for brackets nested a thousand deep, a tag with an invalid value),
or never return. Here each is a UserError, and what is read is small enough to work with.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from model.declared import LARGEST_INTEGER
from model.errors import UserError, quote
from pretrain.utils.files import read_regular

MOST_BYTES = 1 << 26
"""Of one file."""
MOST_LEVELS = 50
"""Deepest nesting of lists and mappings."""
MOST_VALUES = 1_000_000
"""Limit for one file; a YAML alias counts as often as it is used."""


def read_text(path: Path, what: str, hint: str = "") -> str:
    """The text of a file that a user has written. Raises as read_json does, up to "not UTF-8"."""
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{what}: {_name(path)} is not UTF-8 text{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise UserError(f"{what}: cannot read {str(path)!r} ({reason}){hint}") from None


def read_json(path: Path, what: str, hint: str = "") -> Any:
    """The contents of a JSON file, which is named in messages as *what*; *hint* is added where it cannot be
    read.

    Raises:
        UserError: no file, not a regular file, not UTF-8 (a byte order mark is skipped), not JSON, a key
            given twice, or numbers or nesting beyond the limits above.
    """
    return parse_json(read_text(path, what, hint), f"{what}: {_name(path)}")


def read_json_object(path: Path, what: str, hint: str = "") -> dict[str, Any]:
    """As read_json, for a file that must hold one object."""
    value = read_json(path, what, hint)
    if not isinstance(value, dict):
        raise UserError(f"{what}: {_name(path)} holds {quote_json(value)}; it must hold a JSON object, {{…}}")
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
    check_nesting(text, where)
    try:
        value = yaml.load(text, _Loader)
    except Exception as error:  # of any class: a tag such as !!int passes its value to Python unchecked
        raise UserError(f"{where} is not valid YAML ({_reason(error)})") from None
    check_values(value, where)
    return value


def check_nesting(text: str, where: str) -> None:
    """Reject YAML that is nested too deep or not well-formed, with any tags, before a library constructs it.

    libyaml's parser, which PyYAML calls for each level in turn, ends the process at some ten thousand.
    """
    level = 0
    try:
        for event in yaml.parse(text, _SafeLoader):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS:
                break
    except Exception as error:  # besides YAMLError: a lone surrogate
        raise UserError(f"{where} is not valid YAML ({_reason(error)})") from None
    if level > MOST_LEVELS:
        raise UserError(f"{where} is nested more than {MOST_LEVELS} levels deep")


def check_values(value: Any, where: str) -> None:
    """Reject nesting and numbers that arithmetic or other readers cannot handle, NaN and infinities included.

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
                (inner, f"{key}.{quote(name, plain=True)}", level + 1) for name, inner in item.items()
            ]
        elif isinstance(item, list | tuple | set):
            pending += [(inner, key, level + 1) for inner in item]
        elif isinstance(item, int | float) and not abs(item) <= LARGEST_INTEGER:
            raise UserError(
                f"{where}{': ' + key[1:] if key else ''}: {quote(item)} is not valid; give a finite number "
                f"of at most {LARGEST_INTEGER:.1e}"
            )


def quote_json(value: Any) -> str:
    """A value of a JSON file for an error message: true, false and null as JSON spells them."""
    return quote(value) if isinstance(value, str) else quote(json.dumps(value), plain=True)


def parse_fraction(text: str) -> Fraction | None:
    """The exact value of ``0.3`` or ``1/3``; None for other text, exponents included: Fraction expands them,
    which never ends for 1e-99999999."""
    try:
        return Fraction(text.strip()) if re.fullmatch(r"[0-9./ ]{1,40}", text) else None
    except (ValueError, ZeroDivisionError):
        return None


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is five times as fast
QUOTE_COMMAS = '; a text with commas needs quotes inside braces, as in {heads: "2,4,8,8"}'

# The core schema of YAML 1.2 (10.3.2): no octal 010, no sexagesimal 1:30, no yes and no, no dates. Without
# its hexadecimal numbers: 0x12 is a schedule, twelve layers of 0.
_CORE_SCHEMA = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}


class _Loader(_SafeLoader):
    """YAML's safe loader, which reads scalars as YAML 1.2 does and rejects a key that a mapping gives twice,
    however it is written."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping; YAML's own loader keeps the last value of a key."""
        given: dict[Any, str] = {}  # as it is written, by the key's text and by its value
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                value = self.construct_object(key)
                if first := given.get(key_text(value)) or given.get(value):
                    both = quote(first) if first == key.value else f"{first} and {key.value}, one key,"
                    braces = QUOTE_COMMAS if type(value) is int else ""
                    raise yaml.YAMLError(f"it gives {both} twice in one mapping{braces}")
                given[key_text(value)] = given[value] = key.value
        mapping = super().construct_mapping(node, deep)
        return {plain_key(key): value for key, value in mapping.items()}

    def construct_integer(self, node: Any) -> int:
        """Construct an integer: 010 is ten, 0o10 is eight."""
        text = self.construct_scalar(node)
        return int(text, 8 if text.startswith("0o") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 would take for something else."""


_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), [*_first])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def format_yaml(values: Any) -> str:
    """YAML that ``parse_yaml`` reads back, mappings in their own order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def plain_key(key: Any) -> Any:
    """A mapping's key, with numbers that are equal written alike."""
    return int(key) if type(key) is float and key.is_integer() else key


def key_text(key: Any) -> str:
    """A mapping's key as JSON writes it."""
    return key if isinstance(key, str) else json.dumps(plain_key(key), default=str)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"it gives {quote(key)} twice in one object")
        mapping[key] = value
    return mapping


def _name(path: Path) -> str:
    return quote(path, limit=1000, plain=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return quote(" ".join(str(error).split()) or type(error).__name__, limit=200, plain=True)
