"""Each variant's own best value of one setting, found with pilot seeds before the study's seeds are run.

The pilots are a separate study, in the folder ``pilot`` of the study's. What they choose is written into
``tuned.json`` next to it, once: later runs of the study read it from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from model.declared import NonNegativeInt, declared, from_dict, to_dict
from model.errors import UserError
from pretrain.study.settings import label
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import read_json

PILOT = "pilot"
TUNED_FILE = "tuned.json"


@declared()
class Tuned:
    """What was chosen for a variant."""

    field: str
    value: Any
    at_edge: bool
    """Whether the best value is the first or the last that was tried."""
    tried: list[tuple[Any, float | None]]
    """Value and mean result of the pilots, in order; no result where a run failed."""
    seeds: list[NonNegativeInt]

    def answers(self, setting: str, values: Sequence[Any], seeds: Sequence[int]) -> bool:
        """Whether it was chosen among these *values* of *setting*, with these *seeds*."""
        return (self.field, [at for at, _ in self.tried], self.seeds) == (setting, [*values], [*seeds])


def pilot_name(variant: str, value: Any) -> str:
    """The name of the pilots of a variant with a value."""
    return f"{variant}@{label(value)}"


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
    tried: Mapping[str, tuple[str, Sequence[Any]]],
    seeds: Sequence[int],
    results: Mapping[str, Mapping[int, float]],
    higher_is_better: bool = False,
) -> dict[str, Tuned]:
    """What the pilots' results choose for every variant.

    Args:
        tried: of each variant, here by the beginning of its runs' names.
        results: of the finished pilots by the name of the pilot's variant (pilot_name) and seed. A value
            counts if all its seeds are finished.

    Raises:
        UserError: a variant has no value of which all pilots are finished.
    """
    found = {}
    for name, (field, values) in tried.items():
        pilots = [results.get(pilot_name(name, value), {}) for value in values]
        means = [fmean(each.get(seed, math.nan) for seed in seeds) for each in pilots]
        known = [(y, at) for at, y in zip(values, means, strict=True) if math.isfinite(y)]
        if not known:
            valid = f"see the folder {PILOT} of the study's, and give other values"
            raise UserError(f"study: {name}: no value of {field} has a finite result of all pilots; {valid}")
        _, best = (max if higher_is_better else min)(known, key=lambda each: each[0])  # of ties the first
        numbers = all(type(value) in (int, float) for value in values)
        at_edge = numbers and best in (min(values), max(values))
        tried_ones = [(at, y if math.isfinite(y) else None) for at, y in zip(values, means, strict=True)]
        found[name] = Tuned(field, best, at_edge, tried_ones, list(seeds))
    return found
