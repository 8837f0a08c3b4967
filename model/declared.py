"""Declared data: pydantic dataclasses whose types and ranges are checked however an object is made.

``declared`` makes one; ``from_dict`` reads one from what JSON or YAML held; ``explain_error`` is the single
place that turns pydantic's ValidationError into the one-line error that a user sees.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from model.errors import UserError, quote, suggest

C = TypeVar("C")
LARGEST_INTEGER = 2**63 - 1
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""A number is no text, true is no number, an unknown name is an error."""

NonNegativeInt = Annotated[pydantic.NonNegativeInt, Field(le=LARGEST_INTEGER)]
"""pydantic's types of these names, bounded: what is computed with them is int64 or float64."""
PositiveInt = Annotated[pydantic.PositiveInt, Field(le=LARGEST_INTEGER)]
NonNegativeFloat = Annotated[pydantic.NonNegativeFloat, Field(le=LARGEST_INTEGER)]
PositiveFloat = Annotated[pydantic.PositiveFloat, Field(le=LARGEST_INTEGER)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


@dataclass_transform(field_specifiers=(field,))
def declared(section: str = "", frozen: bool = True) -> Callable[[type[C]], type[C]]:
    """Decorate a class of annotated fields: a dataclass that raises UserError for a value outside its
    declaration.

    Args:
        section: the name under which users know the object, the beginning of its fields' names in messages.
        frozen: whether its fields are read-only; if not, an assignment is also checked.
    """

    def decorate(cls: type[C]) -> type[C]:
        config = STRICT if frozen else {**STRICT, "validate_assignment": True}
        made: Any = pydantic.dataclasses.dataclass(frozen=frozen, config=config)(cls)
        init = made.__init__

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **values: Any) -> None:
            try:
                init(self, *args, **values)
            except ValidationError as error:
                raise explain_error(error, section=section, names=[f.name for f in fields(made)]) from None

        made.__init__ = checked
        return made

    return decorate


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def from_dict(kind: type[C], values: Any, where: str = "", section: str = "") -> C:
    """An object of a declared class, or of any type that pydantic knows, from plain lists, mappings and
    numbers.

    Args:
        where: the beginning of messages, such as "checkpoint: runs/a/…/state.json".
        section: what the fields belong to; comes before their names.

    Raises:
        UserError: the first value that the declaration does not admit.
    """
    try:
        # As JSON, in which a list may be a tuple and a mapping an object, and nothing else is converted.
        return _adapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        names = list(getattr(kind, "__dataclass_fields__", ()))
        raise explain_error(error, where, section, names) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}{': ' if where else ''}{quote(error, plain=True)}") from None


def to_dict(value: Any) -> Any:
    """What ``from_dict`` reads: the declared object *value* as lists, mappings, numbers and text."""
    return _adapter(type(value)).dump_python(value, mode="json")


def explain_error(
    error: ValidationError, where: str = "", section: str = "", names: list[str] | None = None
) -> UserError:
    """The first mistake of *error* as a UserError that names the field, its value and what would be valid.

    Args:
        where: the beginning of the line.
        section: what the fields belong to; comes before their names.
        names: the valid names on the outermost level, for a hint at a misspelled one.
    """
    first = error.errors(include_url=False)[0]
    context: Mapping[str, Any] = first.get("ctx") or {}
    cause = context.get("error")
    beginning = f"{where}: " if where else ""
    if isinstance(cause, UserError):  # a check of ours, which names its field itself
        return UserError(f"{beginning}{cause}")
    place = ".".join(quote(part, plain=True) for part in first["loc"] if part != "[key]")
    name = ".".join(part for part in (section, place) if part) or "value"
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = names if names and len(first["loc"]) == 1 else []
        hint = suggest(str(first["loc"][-1]), known) or ("; valid: " + ", ".join(known) if known else "")
        return UserError(f"{beginning}{name}: unknown{hint}")
    if first["type"] in ("missing", "missing_argument"):
        return UserError(f"{beginning}{name}: missing")
    return UserError(f"{beginning}{name}: {quote(first['input'])} is not valid; {describe_valid(first)}")


def describe_valid(error: Any) -> str:
    """What would be valid, in words, where pydantic found *error*, one entry of
    ``ValidationError.errors()``."""
    context: Mapping[str, Any] = error.get("ctx") or {}
    for key, words in (("gt", "above"), ("ge", "from"), ("lt", "below")):
        if key in context:
            return f"give a number {words} {_number(context[key])}"
    if "multiple_of" in context:
        return f"give a multiple of {context['multiple_of']:,}"
    if "le" in context:
        return f"give at most {_number(context['le'])}"
    if error["type"] in ("too_short", "too_long"):
        bound = context.get("max_length", context.get("min_length"))
        most = "least" if error["type"] == "too_short" else "most"
        return f"give at {most} {bound:,} value{'s' if bound > 1 else ''}"
    if error["type"] == "literal_error":
        names = [name.strip("'") for name in re.split(", | or ", context["expected"])]
        return f"give one of {', '.join(names)}{suggest(quote(error['input'], plain=True), names)}"
    if error["type"] == "union_tag_invalid":
        return f"give one of {context['expected_tags']} as its {context['discriminator']}"
    known = {
        "union_tag_not_found": f"give its {context.get('discriminator')}",
        "int_type": "give a whole number",
        "int_from_float": "give a whole number",
        "int_parsing": "give a whole number",
        "int_parsing_size": "give a whole number",
        "float_type": "give a number",
        "float_parsing": "give a number",
        "finite_number": "give a finite number",
        "bool_type": "give true or false",
        "string_type": "give text",
        "list_type": "give a list",
        "tuple_type": "give a list",
        "dict_type": "give a mapping",
        "dataclass_type": "give a mapping",
        "dataclass_exact_type": f"give an object of {context.get('class_name')}, or use recipe()",
        "model_type": "give a mapping",
        "model_attributes_type": "give a mapping",
    }
    said = error["msg"].removeprefix("Value error, ")
    return known.get(error["type"], said[:1].lower() + said[1:])


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
