"""Contrasts of a study file: the mean of some variants less the mean of others, seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from model.errors import UserError, closest, shown
from pretrain.utils.parsing import shown_json

SIDES = ("plus", "minus")
Name = tuple[str, str]
"""Of a variant: the comparison's name (empty in a study of one) and its own."""


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

    @property
    def described(self) -> str:
        """The name, and the formula where that says something else."""
        return self.name if self.name == self.formula else f"{self.name} ({self.formula})"


def full_name(variant: Name) -> str:
    """As a study file writes it: comparison.variant, or the variant alone in a study of one comparison."""
    return ".".join(part for part in variant if part)


def _mean(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    shown_names = names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]
    return f"mean of ({', '.join(shown_names)})"


def parse_contrasts(values: Any, variants: Sequence[Name]) -> Iterator[Contrast]:
    """The contrasts of a study file.

    A variant is named as ``comparison.variant``, or by its own name where only one comparison has it; with ``*`` every
    variant that fits.

    Args:
        values: the file's mapping of names to ``{plus: […], minus: […]}``; None for none.
        variants: all of the study.

    Raises:
        UserError: it names the field, the value and what would be valid.
    """
    if values is None:
        return
    if not isinstance(values, dict):
        raise _refused("contrasts", values, "give a mapping of names to {plus: […], minus: […]}")
    for name, sides in values.items():
        where = f"contrasts.{shown(str(name), plain=True)}"
        if not str(name).strip() or not str(name).isprintable():
            raise _refused("contrasts", name, "give a name of printable characters")
        if not isinstance(sides, dict) or sides.keys() != set(SIDES):
            raise _refused(where, sides, "give a mapping of plus and minus to lists of variants")
        plus, minus = (tuple(_side(sides[side], f"{where}.{side}", variants)) for side in SIDES)
        for side, found in zip(SIDES, (plus, minus), strict=True):
            for variant in found:
                if found.count(variant) > 1 or (side == "minus" and variant in plus):
                    raise _refused(f"{where}.{side}", full_name(variant), "it is named twice; name it once")
        yield Contrast(str(name), plus, minus)


def _side(value: Any, where: str, variants: Sequence[Name]) -> Iterator[Name]:
    given = value if isinstance(value, list) else [value]
    if not given or any(not isinstance(name, str | int) for name in given):
        raise _refused(where, value, "give a list of variants")
    for name in map(str, given):
        yield from _matching(name, where, variants)


def _matching(name: str, where: str, variants: Sequence[Name]) -> Iterable[Name]:
    full = {full_name(variant): variant for variant in variants}
    if name in full:
        return [full[name]]
    own = [variant for variant in variants if variant[1] == name]
    if len(own) == 1:
        return own
    if own:
        options = " or ".join(map(full_name, own[:3]))
        raise _refused(where, name, f"several comparisons have it; give {options}")
    if "*" in name:
        pattern = name.replace("[", "[[]").replace("?", "[?]")  # a star alone is special
        found = [variant for text, variant in full.items() if fnmatchcase(text, pattern)]
        if found:
            return found
    valid = [*full, *dict.fromkeys(variant for _, variant in variants)]
    listed = ", ".join(list(full)[:6]) + (", …" if len(full) > 6 else "")
    raise _refused(where, name, closest(name, valid).removeprefix("; ") or f"variants are {listed}")


def _refused(key: str, value: Any, valid: str) -> UserError:
    return UserError(f"study: {key}: {shown_json(value)} is not valid; {valid}")
