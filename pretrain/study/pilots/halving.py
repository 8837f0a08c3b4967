"""Successive halving: short runs with pilot seeds drop variants, so that only the best are trained at length.

The runs of every rung are a study of their own, in the folder ``rung-N`` of the study's. A rung's run is a
whole run of fewer steps, with the schedule of its own length: the learning rate has fallen when variants are
compared. What is kept is written into ``kept.json``, once (Karnin, Koren and Somekh, ICML 2013; arXiv
1502.07943).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from model.declared import PositiveInt, declared, to_dict
from model.errors import UserError, quote
from pretrain.study.pilots.files import pilot_file, read_record, write_record
from pretrain.study.settings import Settings, read_settings
from pretrain.study.statistics.paired import mean_of, paired_interval

KEPT_FILE = "kept.json"


@declared()
class Halving:
    """A study file's ``halving``."""

    rungs: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=1, max_length=8)]
    """Shares of a run's steps, ascending: how long the runs of each rung are."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of a rung's variants that go on, rounded up, beside the baseline."""

    def __post_init__(self) -> None:
        if sorted(set(self.rungs)) != self.rungs:
            valid = "give ascending shares of the steps"
            raise UserError(f"halving.rungs: {quote(self.rungs)} is not valid; {valid}")


@declared()
class RungResult:
    """A variant at one rung."""

    rung: PositiveInt
    variant: str
    """With the comparison's name."""
    mean: float | None
    """Over the pilot seeds; none where a run failed."""
    kept: bool
    behind: float | None = None
    """Of a dropped variant: how much worse it was than the last that was kept, paired by seed."""
    low: float | None = None
    """The lower end of the 95 % interval of ``behind``; none for one seed."""

    @property
    def may_be_missed(self) -> bool:
        """Whether a dropped variant may be no worse than the last that was kept."""
        return self.behind is not None and (self.low is None or self.low <= 0)


def rung_folder(rung: int) -> str:
    """Name of the folder of a rung, counted from 1."""
    return f"rung-{rung}"


def rung_text(
    file: Mapping[str, Any], halving: Halving, rung: int, seeds: Sequence[int], steps: Mapping[str, int]
) -> str:
    """The study file of a rung.

    Args:
        file: the study's, in plain values.
        rung: counted from 1.
        seeds: the pilot seeds.
        steps: of the whole run of each variant that has come so far, by full name.
    """
    share = halving.rungs[rung - 1]

    def variants_of(full: str, name: str, settings: Settings) -> dict[str, Settings]:
        shorter = {"steps": max(1, round(share * steps[full]))} if full in steps else {}
        return {name: read_settings(settings, name) | shorter} if shorter else {}

    title = f"{file['title'] or 'Variants'}: {share:.4g} of the steps"
    return pilot_file(file, seeds, title, variants_of)


def drop(
    rung: int,
    results: Mapping[str, Mapping[int, float]],
    baseline: str,
    keep: float,
    higher_is_better: bool = False,
) -> list[RungResult]:
    """Who goes on from a rung, of one comparison; the best first.

    Args:
        results: by full name and pilot seed; a variant with a run that failed lacks its seed and is dropped.
        baseline: the full name of the variant that is always kept.
        keep: the share of the variants that go on.
    """
    sign = -1 if higher_is_better else 1
    seeds = {seed for by_seed in results.values() for seed in by_seed}
    means = {
        name: mean_of(by_seed.values()) if set(by_seed) == seeds and by_seed else math.nan
        for name, by_seed in results.items()
    }

    def order(name: str) -> float:
        return sign * means[name] if math.isfinite(means[name]) else math.inf

    ranked = sorted(results, key=order)
    # As written: 0.07 * 100 is above 7 in floating point.
    count = math.ceil(Fraction(str(keep)) * len(ranked))
    going = [name for name in ranked[:count] if math.isfinite(means[name])]
    found = []
    for name in ranked:
        mean = means[name] if math.isfinite(means[name]) else None
        kept = name in going or name == baseline
        behind = low = None
        if not kept and mean is not None and going:
            gaps = [sign * (results[name][seed] - results[going[-1]][seed]) for seed in sorted(seeds)]
            interval = paired_interval(gaps)
            behind, low = interval.mean, interval.low if len(gaps) > 1 else None
        found.append(RungResult(rung, name, mean, kept, behind, low))
    return found


def read_kept(folder: Path) -> list[RungResult]:
    """What earlier rungs found; empty before the first.

    Raises:
        UserError: the file is not one of these.
    """
    return read_record(folder / KEPT_FILE, list[RungResult], [])


def write_kept(folder: Path, found: Sequence[RungResult]) -> None:
    """Write what the rungs found, whole or not at all."""
    write_record(folder / KEPT_FILE, [to_dict(each) for each in found])


def list_remaining(names: Sequence[str], found: Sequence[RungResult]) -> list[str]:
    """The variants that no rung has dropped."""
    dropped = {each.variant for each in found if not each.kept}
    return [name for name in names if name not in dropped]
