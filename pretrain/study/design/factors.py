"""Designed experiments: factors with levels, and the combinations of levels that are trained.

A study file's ``design`` stands in place of its variants. See docs/studies.md.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from model.declared import PositiveInt, declared
from model.errors import UserError, quote, suggest
from model.heads import format_heads, parse_heads
from pretrain.config.run_config import is_folder_name
from pretrain.study.contrasts import Text, refuse
from pretrain.study.design.arrays import MOST_RUNS, compute_strength, full_factorial, orthogonal_array
from pretrain.study.settings import Settings, is_name_part, label, read_settings

MOST_PRIMARY = 3
_PLAIN = (bool, int, float)
_LAYERS = re.compile(r"layers?_(\d{1,4})(?:-(\d{1,4}))?")


Level = Annotated[str, BeforeValidator(lambda value: label(value) if type(value) in _PLAIN else value)]
"""A level as a contrast or prediction names it: a value has the name that it has among the levels."""
Levels = Annotated[
    list[Level],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1),
]


@declared()
class LevelDifference:
    """The mean of some levels of one factor less that of others."""

    factor: Text
    plus: Levels
    minus: Levels

    @property
    def formula(self) -> str:
        """As it is printed."""
        return f"{self.factor}: {', '.join(self.plus)} − {', '.join(self.minus)}"


@declared()
class LevelContrast(LevelDifference):
    """A contrast of a design; with *by* how much larger its difference is at some levels of another factor
    than at others, which is an interaction."""

    by: LevelDifference | None = None

    @property
    def differences(self) -> list[LevelDifference]:
        """Its own, and that of *by* if it has one."""
        return [self, self.by] if self.by else [self]


@declared()
class DesignFile:
    """The design of a study file as it is written."""

    factors: Annotated[dict[Text, list[Any] | dict[Text, Settings]], Field(min_length=2)]
    """``layer_3`` or ``layers_3-5``: head counts; a field's name, as ``optimizer.learning_rate``: its values;
    any other name: the settings of each named level."""
    kind: Literal["full", "orthogonal", "fractional"]
    runs: PositiveInt | None = None
    """Combinations that are trained; all of them with kind full."""
    contrasts: Annotated[dict[Text, LevelContrast], Field(max_length=MOST_PRIMARY)] | None = None
    """The primary ones, which are adjusted for their number (Holm)."""
    predict: dict[Text, Text | dict[Text, Level]] | None = None
    """Schedules whose loss is predicted beside that of the best."""


@dataclass(frozen=True)
class Factor:
    """What is varied."""

    name: str
    levels: tuple[str, ...]
    """As parts of the variants' names."""
    settings: tuple[Settings, ...]
    """Of each level; none for layers."""
    layers: tuple[int, ...] = ()
    """Whose head counts the levels are."""


@dataclass(frozen=True)
class Design:
    """Factors, and the combinations of their levels that are trained."""

    factors: tuple[Factor, ...]
    strength: int
    """Any so many factors have every combination of levels equally often (at most 4 are looked at); 4 where
    all factors together do, however few they are."""
    rows: dict[str, tuple[int, ...]]
    """The level of each factor, from 0, by variant."""
    contrasts: Mapping[str, LevelContrast]
    predict: Mapping[str, dict[str, str]]
    """Schedules by name: the level of each factor that is stated."""

    @property
    def described(self) -> str:
        """Its size and what it can estimate."""
        sizes = Counter(len(factor.levels) for factor in self.factors)
        counts = " x ".join(f"{size}^{number}" if number > 1 else str(size) for size, number in sizes.items())
        return f"{len(self.rows)} of {counts} combinations; {SEEN[self.strength]}"


SEEN = {
    2: "main effects are balanced, and each is confounded with interactions of two other factors",
    3: "interactions of two factors are confounded with each other, but not with main effects",
    4: "main effects and interactions of two factors can be estimated",
}
"""What can be estimated, by strength."""


def read_design(file: DesignFile, heads: Sequence[int]) -> tuple[Design, dict[str, Settings]]:
    """The design, and the settings of every combination by the variant's name.

    Args:
        heads: of the model, layer by layer, for layers that no factor has.

    Raises:
        UserError: it names the field, the value and what would be valid.
    """
    factors = tuple(_factor(name, given, len(heads)) for name, given in file.factors.items())
    taken: dict[int, str] = {}
    for factor in factors:
        for layer in factor.layers:
            if layer in taken:
                refuse("design.factors", factor.name, f"layer {layer} is in {taken[layer]} already")
            taken[layer] = factor.name
    counts = [len(factor.levels) for factor in factors]
    if file.kind == "full":
        combinations = math.prod(counts)
        if file.runs not in (None, combinations) or combinations > MOST_RUNS:
            valid = f"kind full takes all {combinations:,} combinations; at most {MOST_RUNS:,} are possible"
            refuse("design.runs", file.runs, valid)
        array = full_factorial(counts)
    elif file.runs is None:
        raise UserError(f"study: design.runs: missing; kind {file.kind} needs it")
    else:
        array = orthogonal_array(counts, file.runs, 3 if file.kind == "fractional" else 2)
    rows: dict[str, tuple[int, ...]] = {}
    settings: dict[str, Settings] = {}
    # In a random order what changes with time, such as the machine's load, falls on no level more than on
    # others, and a part of the runs can be analysed.
    for row in random.Random(0).sample(array.tolist(), len(array)):
        name = "-".join(factor.levels[level] for factor, level in zip(factors, row, strict=True))
        if not is_folder_name(name) or name in rows:
            refuse(
                "design.factors", name, "levels make up the names of folders; give short names that differ"
            )
        rows[name] = tuple(row)
        settings[name] = _combine_settings(factors, row, heads)
    contrasts = file.contrasts or {}
    predict = {name: _levels(factors, name, given) for name, given in (file.predict or {}).items()}
    # Of all combinations any columns hold every one equally often; there is nothing to count.
    counted = len(factors) if file.kind == "full" else compute_strength(array, counts)
    strength = 4 if counted == len(factors) else counted
    _check_contrasts(contrasts, factors, strength)
    return Design(factors, strength, rows, contrasts, predict), settings


def _find_factor(factors: Sequence[Factor], name: str, where: str) -> Factor:
    """The factor of that name; UserError without one."""
    names = [factor.name for factor in factors]
    if name not in names:
        refuse(where, name, f"factors are {', '.join(names)}{suggest(name, names)}")
    return factors[names.index(name)]


def _factor(name: str, given: list[Any] | dict[str, Settings], layers: int) -> Factor:
    where = f"design.factors.{quote(name, plain=True)}"
    if len(given) < 2 or len(given) > 16:
        refuse(where, given, "give from 2 to 16 levels")
    found = _LAYERS.fullmatch(name)
    if isinstance(given, dict):
        if found:
            refuse(where, given, "give a list of head counts")
        named = tuple(read_settings(level, where) for level in given.values())
        return Factor(name, _labels(where, list(given)), named)
    labels = _labels(where, given)
    if not found:
        return Factor(name, labels, tuple(read_settings({name: value}, where) for value in given))
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last < layers:
        refuse("design.factors", name, f"the model has layers 0 to {layers - 1}")
    if not all(type(value) is int and value > 0 for value in given):
        refuse(where, given, "give head counts")
    return Factor(name, labels, tuple({} for _ in given), tuple(range(first, last + 1)))


def _labels(where: str, values: Sequence[Any]) -> tuple[str, ...]:
    labels = list(map(label, values))
    for each in labels:
        if not is_name_part(each) or "-" in each.replace("e-", "") or labels.count(each) > 1:
            valid = "each once, as names that can be part of a folder's, without spaces and dashes"
            refuse(where, values, f"give {valid}, or settings by such names")
    return tuple(labels)


def _combine_settings(factors: Sequence[Factor], row: Sequence[int], heads: Sequence[int]) -> Settings:
    """The settings of a row. Two factors may set fields of one section."""
    schedule = list(heads)
    settings: Settings = {}
    for factor, level in zip(factors, row, strict=True):
        for layer in factor.layers:
            schedule[layer] = int(factor.levels[level])
        for key in settings.keys() & factor.settings[level].keys():
            refuse("design.factors", factor.name, f"another factor sets {key}; vary each by one")
        settings |= factor.settings[level]
    if any(factor.layers for factor in factors):
        if "heads" in settings:
            refuse("design.factors", "heads", "layers have factors of their own")
        settings["heads"] = format_heads(schedule)
    return settings


def _check_contrasts(
    contrasts: Mapping[str, LevelContrast], factors: Sequence[Factor], strength: int
) -> None:
    for name, contrast in contrasts.items():
        where = f"design.contrasts.{quote(name, plain=True)}"
        for key, difference in zip((where, f"{where}.by"), contrast.differences, strict=False):
            factor = _find_factor(factors, difference.factor, f"{key}.factor")
            named = [*difference.plus, *difference.minus]
            for level in named:
                if level not in factor.levels or named.count(level) > 1:
                    valid = f"levels of {factor.name} are {', '.join(factor.levels)}; name each once"
                    refuse(key, level, valid)
        if contrast.by and contrast.by.factor == contrast.factor:
            refuse(f"{where}.by.factor", contrast.by.factor, "name another factor than the contrast's own")
        if contrast.by and strength < 4:
            valid = f"in this design {SEEN[strength]}; take kind full or more runs, or leave it out"
            refuse(f"{where}.by", contrast.by.factor, valid)


def _levels(factors: Sequence[Factor], name: str, given: str | dict[str, str]) -> dict[str, str]:
    """The levels that a schedule to be predicted states: a head schedule, or levels by factor."""
    where = f"design.predict.{quote(name, plain=True)}"
    if isinstance(given, str):
        try:
            heads = parse_heads(given)
        except UserError as error:
            raise UserError(f"study: {where}: {error}") from None
        by_factor: dict[str, str] = {}
        for factor in factors:
            counts = [heads[layer] if layer < len(heads) else 0 for layer in factor.layers]
            if len(set(counts)) > 1:
                refuse(where, given, f"layers of {factor.name} have one head count")
            if counts:
                by_factor[factor.name] = str(counts[0])
        given = by_factor
    for factor_name, level in given.items():
        factor = _find_factor(factors, factor_name, where)
        if level not in factor.levels:
            refuse(where, level, f"levels of {factor.name} are {', '.join(factor.levels)}")
    return dict(given)
