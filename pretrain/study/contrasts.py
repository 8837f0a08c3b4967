"""Contrasts of a study file: the mean of some variants less the mean of others, seed by seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, Field

from model.declared import declared
from model.errors import UserError, quote, suggest

Name = tuple[str, str]
"""Of a variant: the comparison's name (empty in a study of one) and its own."""


def _text(value: Any) -> Any:
    """A number or a truth value as JSON writes it as a key, so that names of variants may be any."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Text = Annotated[str, BeforeValidator(_text)]
Names = Annotated[
    list[Text],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1),
]


@declared()
class Sides:
    """A contrast as a study file writes it: names of variants, or patterns; one alone needs no list."""

    plus: Names
    minus: Names


@dataclass(frozen=True)
class Contrast:
    """A difference of means over variants, which need not be of one comparison."""

    name: str
    plus: tuple[Name, ...]
    minus: tuple[Name, ...]

    @property
    def variants(self) -> tuple[Name, ...]:
        """All that it needs a finished run of, for a seed to count."""
        return self.plus + self.minus

    @property
    def formula(self) -> str:
        """What is subtracted from what; of many variants some."""
        return " − ".join(_mean(list(map(full_name, side))) for side in (self.plus, self.minus))


def full_name(variant: Name) -> str:
    """As a study file writes it: comparison.variant, or the variant alone in a study of one comparison."""
    return ".".join(part for part in variant if part)


def _mean(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    shown_names = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return f"mean of ({', '.join(shown_names)})"


def parse_contrasts(values: Mapping[str, Sides], variants: Sequence[Name]) -> Iterator[Contrast]:
    """The contrasts of a study file.

    A variant is named as ``comparison.variant``, or by its own name where only one comparison has it; with
    ``*`` every variant that fits.

    Args:
        values: the file's, by name.
        variants: all of the study.

    Raises:
        UserError: it names the field, the value and what would be valid.
    """
    for name, sides in values.items():
        if not name.strip() or not name.isprintable():
            refuse("contrasts", name, "give a name of printable characters")
        where = f"contrasts.{quote(name, plain=True)}"
        plus, minus = (
            tuple(variant for each in given for variant in _match_variants(each, f"{where}.{side}", variants))
            for side, given in (("plus", sides.plus), ("minus", sides.minus))
        )
        variant, count = Counter(plus + minus).most_common(1)[0]
        if count > 1:
            refuse(where, full_name(variant), "it is named twice; name it once")
        yield Contrast(name, plus, minus)


def _match_variants(name: str, where: str, variants: Sequence[Name]) -> Sequence[Name]:
    found = [variant for variant in variants if full_name(variant) == name]
    found = found or [variant for variant in variants if variant[1] == name]
    if len(found) > 1:
        refuse(where, name, f"several comparisons have it; give {' or '.join(map(full_name, found[:3]))}")
    if "*" in name:  # a star alone is special
        pattern = name.replace("[", "[[]").replace("?", "[?]")
        found = found or [variant for variant in variants if fnmatchcase(full_name(variant), pattern)]
    if not found:
        valid = list(map(full_name, variants))
        hint = suggest(name, valid).removeprefix("; ")
        refuse(where, name, hint or f"variants are {', '.join(valid[:6])}{', …' if len(valid) > 6 else ''}")
    return found


def refuse(key: str, value: Any, valid: str) -> NoReturn:
    """Raise a UserError about a key of a study file, its value and what would be valid."""
    raise UserError(f"study: {key}: {quote(value)} is not valid; {valid}")
