"""Reads a declared command line: one class of annotated fields is its parser, its checks and its help."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from model.declared import explain_error
from pretrain.config.command_line import CommandParser, describe_values, documentation

C = TypeVar("C")


def parse_options(
    kind: type[C],
    arguments: Sequence[str],
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    epilog: str | None = None,
) -> C:
    """The command line *arguments* as an object of *kind*, a class made by ``declared``.

    Each field is a flag, ``--name VALUE`` (or ``--name`` alone, if its default is False); the docstring below
    it is its help. A field's value is the text given, converted to its type; one whose default is () takes
    several texts.

    Args:
        positional: fields that are given by their place instead.

    Raises:
        UserError: an unknown flag (with the closest), a value missing or outside its declaration.
    """
    parser = CommandParser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    documented = documentation(kind)
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    parser.may_be_empty = {field.name for field in fields if field.default == ""}
    for field in fields:
        help = documented.get(field.name, "")
        if field.default is False:
            parser.add_argument(f"--{field.name}", action="store_const", const="true", help=help)
            continue
        if field.default not in (None, "", (), dataclasses.MISSING):
            help += f" (default: {field.default})"
        if field.name in positional:
            count = None if field.default is dataclasses.MISSING else "?"
            parser.add_argument(field.name, nargs=count, metavar=field.name.upper(), help=help)
        else:
            several = "+" if field.default == () else None
            values = describe_values(hints[field.name])
            parser.add_argument(f"--{field.name}", metavar=values, nargs=several, help=help)
    given = {
        name: text for name, text in vars(parser.parse_args(list(arguments))).items() if text is not None
    }
    # argparse would ask for these before it names a flag that it does not know.
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if missing := [f"--{name}" for name in needed if name not in given]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    try:
        return TypeAdapter(kind).validate_python(given, strict=False)
    except ValidationError as error:
        raise explain_error(error, names=[field.name for field in fields]) from None
