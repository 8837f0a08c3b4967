"""Each variant's own best value of one setting, found with pilot seeds before the study's seeds are run.

The pilots are a study of their own, in the folder ``pilot`` of the study's. What they choose is written into
``tuned.json`` beside it, once: later runs of the study read it from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

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


def choose(
    values: Sequence[Any], results: Sequence[float], higher_is_better: bool = False
) -> tuple[Any, bool]:
    """The best value by its results: between numbers above 0 the vertex of the parabola, in the logarithm of
    the value, through the best and its two neighbours; at an edge, and for anything else, the best itself.

    Args:
        values: numbers in any order, or anything else.
        results: of each; NaN where there is none.

    Returns:
        The value, and whether it is an edge of the values.

    Raises:
        ValueError: no result is finite.
    """
    losses = np.array(results) * (-1 if higher_is_better else 1)
    losses[~np.isfinite(losses)] = math.inf
    if np.isinf(losses).all():
        raise ValueError("no finite result")
    numbers = all(type(value) in (int, float) and value > 0 for value in values)
    order = np.argsort(values) if numbers else np.arange(len(values))
    best = int(np.argmin(losses[order]))
    at_edge = numbers and best in (0, len(order) - 1)
    around = order[max(0, best - 1) : best + 2]
    curved = len(around) == 3 and np.isfinite(losses[around]).all() and np.ptp(losses[around]) > 0
    if at_edge or not curved or not all(type(value) is float and value > 0 for value in values):
        return values[order[best]], at_edge
    logarithms = np.log([values[place] for place in around])
    curvature, slope, _ = np.polyfit(logarithms - logarithms[1], losses[around] - losses[order[best]], 2)
    return float(f"{math.exp(logarithms[1] - slope / (2 * curvature)):.4g}"), at_edge


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
        pilots = [results.get(pilot_name(name, value), {}) for value in values]
        means = [fmean(each.get(seed, math.nan) for seed in seeds) for each in pilots]
        try:
            value, at_edge = choose(values, means, higher_is_better)
        except ValueError:
            raise UserError(
                f"study: {name}: no value of {field} has a finite result of all its pilots; see the folder "
                f"{PILOT} of the study's, and give other values"
            ) from None
        known = (mean if math.isfinite(mean) else None for mean in means)
        pairs = [list(pair) for pair in zip(values, known, strict=True)]
        found[name] = Tuned(field, value, at_edge, pairs, list(seeds))
    return found
