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

import numpy as np
from numpy.typing import NDArray

from model.errors import quote, suggest
from pretrain.study.settings import label, refuse

Weights = dict[str, float]
"""By a variant's full name."""
Levels = Mapping[str, Sequence[str]]
"""The labels of each factor's levels."""
Rows = Mapping[str, Sequence[str]]
"""By a variant's full name: its level of each factor, in the factors' order."""

# Names of levels may hold dashes and commas: an operator has a space behind it.
_TOKEN = re.compile(r"mean\([^()]*\)|[()]|[-+−*/](?=\s|$)|[^\s()]*[^\s(),]|\S")
_SIGNS = {*"()-+*/"}
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
        weights, order = _read(formula, f"contrasts.{quote(name, plain=True)}", levels, rows)
        yield Contrast(name, formula, weights, order, primary is None or name in primary)


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
        more = ", …" if len(rows) > 6 else ""
        valid = f"variants are {', '.join([*rows][:6])}{more}; operators need spaces around them"
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


def _read(formula: str, where: str, levels: Levels, rows: Rows) -> tuple[Weights, int]:
    """The weights of a formula without those that are zero, and the most factors of a name in it."""
    from patsy import DesignInfo, PatsyError  # takes a while

    names, tokens = list(rows), [token.replace("−", "-") for token in _TOKEN.findall(formula)]
    order, terms, text = 0, list[NDArray[np.float64]](), []
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        number = (before == "/" or after == "*") and _NUMBER.fullmatch(token) and float(token)
        if token in _SIGNS or number:
            text.append(token)
            continue
        inner = re.fullmatch(r"mean\((.*)\)", token)
        chosen = set[str]()
        for name in re.split(r",\s+", inner[1].strip()) if inner else [token]:
            found, factors = match_variants(name, where, levels, rows)
            order, chosen = max(order, factors), chosen.union(found)
        text.append(f"_{len(terms)}_")
        terms.append(np.array([name in chosen for name in names]) / len(chosen))
    try:
        linear = DesignInfo([f"_{place}_" for place in range(len(terms))]).linear_constraint(" ".join(text))
        total = linear.coefs[0] @ np.array(terms)
    except (PatsyError, IndexError):
        valid = "separate names by + and -, each between spaces, and close every bracket"
        refuse(where, formula, f"{valid}; numbers stand before * or behind /")
    if abs(total.sum()) > 1e-9:
        refuse(where, formula, f"its weights add up to {total.sum():.4g}; those of a contrast add up to 0")
    weights = {name: float(weight) for name, weight in zip(names, total, strict=True) if abs(weight) > 1e-12}
    return weights or refuse(where, formula, "it subtracts variants from themselves"), order
