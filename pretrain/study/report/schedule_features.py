"""Numbers that describe a head schedule, to tell apart what may explain its loss.

The ablation of arXiv 2606.27449 compares schedules that ascend, and its gains correlate about as well with the mean
head count as with anything else. So a study needs schedules in which these features do not move together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from model.errors import UserError
from pretrain.config.run_config import RunConfig
from pretrain.study.statistics import Regression, regress
from pretrain.study.study_file import differing_fields

FEATURES = {
    "mean heads": "mean head count over the layers",
    "direction": "rank correlation of head count and layer, from -1 (descending) to 1 (ascending); 0 for a uniform "
    "schedule",
    "smoothness": "mean of |log2(h_(l+1) / h_l)| over neighbouring layers, in doublings; 0 for a uniform schedule",
    "first count": "log2 of the first layer's head count",
}
FEWEST_SCHEDULES = 3
OF_THE_MODEL = ("heads", "model", "architecture")
"""Fields of RunConfig that describe the model."""


def schedule_features(heads: Sequence[int]) -> dict[str, float]:
    """Compute the FEATURES of a schedule (arXiv 2606.27449, its ablation's weak points).

    Args:
        heads: head count of each layer, the first layer first.

    Raises:
        UserError: no layer, or a layer without heads.
    """
    if not heads or min(heads) < 1:
        raise UserError(f"heads: {list(heads)} is not a schedule; give a positive number for each layer")
    steps = [abs(math.log2(following / count)) for count, following in pairwise(heads)]
    return {
        "mean heads": fmean(heads),
        "direction": direction(heads),
        "smoothness": fmean(steps) if steps else 0.0,
        "first count": math.log2(heads[0]),
    }


def direction(heads: Sequence[int]) -> float:
    """Spearman's rank correlation of head count and layer; 0 where all counts are equal.

    Ranks, not counts: 2,4,8,16 ascends as steadily as 4,5,6,7.
    """
    ranks = _ranks(heads)
    center = (len(heads) - 1) / 2
    spread = sum((rank - center) ** 2 for rank in ranks)
    if not spread:
        return 0.0
    together = sum((rank - center) * (layer - center) for layer, rank in enumerate(ranks))
    return together / math.sqrt(spread * sum((layer - center) ** 2 for layer in range(len(heads))))


def _ranks(values: Sequence[int]) -> list[float]:
    """The place of each value in ascending order, from 0; equal values share the mean of their places."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def order(heads: Sequence[int]) -> str:
    """The word of the head-progression note for a schedule: ascending, constant, descending, or mixed."""
    rises = {following > count for count, following in pairwise(heads) if following != count}
    if not rises:
        return "constant"
    return "mixed" if len(rises) > 1 else "ascending" if True in rises else "descending"


def beside_heads(run: RunConfig, baseline: RunConfig) -> list[str]:
    """Fields other than the head schedule in which two runs differ: with any, heads do not explain the difference.

    Two presets may differ in more than their heads, so the models are compared, not their names.
    """
    fields = [key for key in differing_fields(run, baseline) if key.split(".")[0] not in OF_THE_MODEL]
    if run.growth.active or baseline.growth.active:
        return fields or ["growth"]
    model, other = run.build_model_config(), baseline.build_model_config()
    if model.num_layers != other.num_layers:
        return [*fields, "layers"]
    lines = model.difference(other)
    return fields + [name for name in (line.partition(":")[0] for line in lines) if name != "heads"]


@dataclass(frozen=True)
class Explanation:
    """The features of schedules, and what a regression of their outcome on these says."""

    features: dict[str, dict[str, float]]
    """The FEATURES of each variant."""
    outcome: dict[str, float]
    """Of each variant."""
    regression: Regression | None
    reason: str = ""
    """Why there is no regression."""


def explain(schedules: Mapping[str, Sequence[int]], outcome: Mapping[str, float]) -> Explanation:
    """Regress an outcome on the features of schedules; there must be three schedules at least.

    Args:
        schedules: head count of each layer, by variant.
        outcome: a finite number for each variant.
    """
    features = {name: schedule_features(heads) for name, heads in schedules.items()}
    distinct = len({tuple(heads) for heads in schedules.values()})
    if distinct < FEWEST_SCHEDULES:
        reason = (
            f"{distinct} schedule{'s' * (distinct != 1)}, and to tell features apart takes {FEWEST_SCHEDULES}"
        )
        return Explanation(features, dict(outcome), None, reason)
    columns: dict[str, Sequence[float]] = {
        name: [of_variant[name] for of_variant in features.values()] for name in FEATURES
    }
    return Explanation(features, dict(outcome), regress(columns, [outcome[name] for name in features]))
