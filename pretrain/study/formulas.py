"""Contrasts of a study file: formulas over its variants and their levels.

    "ascending - descending"                            means over all variants that have these levels
    "(swiglu.slow - swiglu.fast) - (mlp.slow - mlp.fast)"
    "heads[3]=2 - mean(heads[3]=4, heads[3]=8)"
    "mean(config-*, prism) - uniform"

A name is a variant's, or levels joined by dots, and means the average over all variants that have them; a
level that two factors have is written ``FACTOR=LEVEL``. ``mean(…)`` averages over all variants that its names
match.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from model.errors import quote, suggest
from pretrain.study.settings import label, refuse

Weights = dict[str, float]
"""By a variant's full name."""
Levels = Mapping[str, Sequence[str]]
"""The labels of each factor's levels."""
Rows = Mapping[str, Sequence[str]]
"""By a variant's full name: its level of each factor, in the factors' order."""

# Names of levels may hold dashes and commas: an operator has a space behind it.
_TOKEN = re.compile(r"\s*(mean\(|[()]|[-+−*/,](?=\s|$)|[^\s()]*[^\s(),])")
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of variants, whose weights add up to zero."""

    name: str
    formula: str
    weights: Weights
    order: int
    """The most factors of which one of its names gives levels."""
    primary: bool
    """Whether its p is adjusted together with those of the other primary ones."""


def read_contrasts(
    formulas: Mapping[str, str], primary: Sequence[str] | None, levels: Levels, rows: Rows
) -> Iterator[Contrast]:
    """The contrasts of a study file.

    Args:
        formulas: by name.
        primary: the names of the primary ones; None: all.

    Raises:
        UserError: it names the contrast, what is wrong in it and what would be valid.
    """
    for name in primary or ():
        if name not in formulas:
            refuse("primary", name, f"give names of contrasts{suggest(name, formulas)}")
    for name, formula in formulas.items():
        if not name.strip() or not name.isprintable():
            refuse("contrasts", name, "give a name of printable characters")
        reader = _Reader(formula, f"contrasts.{quote(name, plain=True)}", levels, rows)
        weights = reader.read()
        yield Contrast(name, formula, weights, reader.order, primary is None or name in primary)


def match_variants(name: str, where: str, levels: Levels, rows: Rows) -> tuple[list[str], int]:
    """The variants that *name* means, in the study's order, and of how many factors it gives levels.

    Raises:
        UserError: there is none, or a level is one of two factors.
    """
    if name in rows:
        return [name], len(levels)
    chosen = _find_levels(name.split("."), where, levels)
    found = [each for each, own in rows.items() if all(own[at] in named for at, named in chosen.items())]
    if not chosen or not found:
        if (factor := name.rpartition("=")[0]) in levels:
            refuse(where, name, f"levels of {factor} are {', '.join(levels[factor])}")
        known = [*rows, *(each for of_factor in levels.values() for each in of_factor)]
        valid = f"variants are {', '.join([*rows][:6])}{', …' if len(rows) > 6 else ''}"
        refuse(where, name, suggest(name, known).removeprefix("; ") or valid)
    return found, len(chosen)


def _find_levels(parts: Sequence[str], where: str, levels: Levels) -> dict[int, set[str]]:
    """The levels that the parts of a name give, by the factor's place; empty if they give none. A level's own
    name may have dots."""
    for size in range(len(parts), 0, -1):
        if not (first := _find_level(".".join(parts[:size]), where, levels)):
            continue
        rest = _find_levels(parts[size:], where, levels)
        if size == len(parts) or (rest and not rest.keys() & first.keys()):
            return first | rest
    return {}


def _find_level(text: str, where: str, levels: Levels) -> dict[int, set[str]]:
    factor, given, value = text.rpartition("=")
    with contextlib.suppress(ValueError):  # 2e-3 is the level 0.002
        value = label(float(value))
    if given:
        known = factor in levels and value in levels[factor]
        return {[*levels].index(factor): {value}} if known else {}
    found = {}
    for place, labels in enumerate(levels.values()):
        # A star alone is special.
        patterns = [each.replace("[", "[[]").replace("?", "[?]") for each in (text, value)]
        if matching := {each for each in labels for pattern in patterns if fnmatchcase(each, pattern)}:
            found[place] = matching
    if len(found) > 1:
        factors = " or ".join(f"{factor}={text}" for at, factor in enumerate(levels) if at in found)
        refuse(where, text, f"several factors have this level; give {factors}")
    return found


class _Reader:
    """Reads one formula by recursive descent."""

    def __init__(self, formula: str, where: str, levels: Levels, rows: Rows) -> None:
        self.formula, self.where, self.levels, self.rows = formula, where, levels, rows
        self.tokens = [token.replace("−", "-") for token in _TOKEN.findall(formula)]
        self.order = 0

    def read(self) -> Weights:
        """The weights of all variants; those without one are left out."""
        weights = self._sum()
        if self.tokens:
            self._refuse(
                f"{quote(self.tokens[0])} is not expected there; separate names by + and -, each "
                "between spaces"
            )
        if abs(total := sum(weights.values())) > 1e-9:
            self._refuse(f"its weights add up to {total:.4g}; those of a contrast add up to 0")
        weights = {name: weight for name, weight in weights.items() if abs(weight) > 1e-12}
        return weights or self._refuse("it subtracts variants from themselves")

    def _refuse(self, problem: str) -> NoReturn:
        refuse(self.where, self.formula, problem)

    def _take(self, *expected: str) -> str:
        """The next token if it is one of these, or any; empty if it is not, or none is left."""
        if self.tokens and (not expected or self.tokens[0] in expected):
            return self.tokens.pop(0)
        return ""

    def _sum(self) -> Weights:
        sign = -1.0 if self._take("-", "+") == "-" else 1.0
        total = _scale(self._product(), sign)
        while operator := self._take("+", "-"):
            for name, weight in self._product().items():
                total[name] = total.get(name, 0.0) + (weight if operator == "+" else -weight)
        return total

    def _product(self) -> Weights:
        factor = 1.0
        if len(self.tokens) > 1 and self.tokens[1] == "*" and _NUMBER.fullmatch(self.tokens[0]):
            factor = float(self._take())
            self._take("*")
        value = self._value()
        if self._take("/"):
            if not _NUMBER.fullmatch(self.tokens[0] if self.tokens else "") or not float(self.tokens[0]):
                self._refuse("give a number behind /")
            factor /= float(self._take())
        return _scale(value, factor)

    def _value(self) -> Weights:
        token = self._take()
        if token == "(":
            inner = self._sum()
            return inner if self._take(")") else self._refuse("a bracket is not closed")
        if token == "mean(":
            named = self._match(self._take())
            while self._take(","):
                named += [name for name in self._match(self._take()) if name not in named]
            if not self._take(")"):
                self._refuse("give names between commas in mean(…), each comma before a space")
            return {name: 1 / len(named) for name in named}
        named = self._match(token)
        return {name: 1 / len(named) for name in named}

    def _match(self, token: str) -> list[str]:
        if not token or token in {"(", ")", "mean(", *"-+*/,"}:
            self._refuse(f"a name is missing{f' before {quote(token)}' if token else ' at its end'}")
        found, factors = match_variants(token, self.where, self.levels, self.rows)
        self.order = max(self.order, factors)
        return found


def _scale(weights: Weights, factor: float) -> Weights:
    return {name: factor * weight for name, weight in weights.items()}
