"""Each variant's own best value of one setting, found with pilot seeds before the study's seeds are run.

The pilots are a study of their own, in the folder ``pilot`` of the study's. What they choose is written into
``tuned.json`` beside it, once: later runs of the study read it from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.declared import NonNegativeInt, declared, from_dict, to_dict
from model.errors import UserError
from pretrain.study.settings import label
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import read_json

PILOT = "pilot"
TUNED_FILE = "tuned.json"
Tried = Mapping[str, tuple[str, Sequence[Any]]]
"""Setting and values by the variant's full name."""


@declared()
class Tuned:
    """What was chosen for a variant."""

    field: str
    value: Any
    at_edge: bool
    """Whether the best value is the first or the last that was tried."""
    tried: list[list[Any]]
    """Value and mean result of the pilots, in order; no result where a run failed."""
    seeds: list[NonNegativeInt]


def pilot_name(variant: str, value: Any) -> str:
    """The name of the pilots of a variant with a value."""
    return f"{variant}@{label(value)}"


# ---------------------------------------------------------------------- choice


@dataclass(frozen=True)
class Choice:
    """The best of several values."""

    value: Any
    at_edge: bool


def choose(values: Sequence[Any], results: Sequence[float], higher_is_better: bool = False) -> Choice:
    """The best value by its results: between numbers above 0 the vertex of the parabola, in the logarithm of
    the value, through the best and its two neighbours; at an edge, and for anything else, the best itself.

    Args:
        values: numbers in any order, or anything else.
        results: of each; NaN where there is none.

    Raises:
        ValueError: no result is finite.
    """
    losses = [-result if higher_is_better else result for result in results]
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    if not any(map(math.isfinite, losses)):
        raise ValueError("no finite result")
    numbers = all(type(value) in (int, float) and value > 0 for value in values)
    order = (
        sorted(range(len(values)), key=lambda place: values[place]) if numbers else list(range(len(values)))
    )
    best = min(range(len(order)), key=lambda place: losses[order[place]])
    value, at_edge = values[order[best]], numbers and best in (0, len(order) - 1)
    around = order[best - 1 : best + 2] if 0 < best < len(order) - 1 else []
    if not numbers or any(type(each) is int for each in values) or not around:
        return Choice(value, at_edge)
    if not all(math.isfinite(losses[place]) for place in around):
        return Choice(value, at_edge)
    (x0, x1, x2), (y0, y1, y2) = (
        [math.log(values[place]) for place in around],
        [losses[place] for place in around],
    )
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (right - left) / (x2 - x0)
    vertex = (x0 + x1) / 2 - left / (2 * curvature) if curvature > 0 else x1
    return Choice(float(f"{math.exp(vertex):.4g}"), at_edge)


# ---------------------------------------------------------------------- files


def read_tuned(folder: Path) -> dict[str, Tuned]:
    """What was chosen, by the variant's full name; empty before the pilots are finished.

    Raises:
        UserError: the file is not one of these.
    """
    path = folder / TUNED_FILE
    return from_dict(dict[str, Tuned], read_json(path, "study"), f"study: {path}") if path.exists() else {}


def write_tuned(folder: Path, tuned: Mapping[str, Tuned]) -> None:
    """Write what was chosen, whole or not at all."""
    plain = {name: to_dict(each) for name, each in tuned.items()}
    write_atomically(folder / TUNED_FILE, json.dumps(plain, indent=1) + "\n")


def choose_all(
    tried: Tried,
    seeds: Sequence[int],
    results: Mapping[str, Mapping[int, float]],
    higher_is_better: bool = False,
) -> dict[str, Tuned]:
    """What the pilots' results choose for every variant.

    Args:
        results: of the finished pilots by the name of the pilot's variant (pilot_name) and seed. A value
            counts if all its seeds are finished.

    Raises:
        UserError: a variant has no value of which all pilots are finished.
    """
    found = {}
    for name, (field, values) in tried.items():
        means = []
        for value in values:
            of_value = results.get(pilot_name(name, value), {})
            complete = all(seed in of_value for seed in seeds)
            means.append(sum(of_value.values()) / len(of_value) if complete else math.nan)
        try:
            choice = choose(values, means, higher_is_better)
        except ValueError:
            raise UserError(
                f"study: {name}: no value of {field} has a finite result of all its pilots; see the folder "
                f"{PILOT} of the study's, and give other values"
            ) from None
        tried_values = [
            [value, mean if math.isfinite(mean) else None] for value, mean in zip(values, means, strict=True)
        ]
        found[name] = Tuned(field, choice.value, choice.at_edge, tried_values, list(seeds))
    return found
