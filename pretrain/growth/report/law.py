"""The head count that the law of arXiv 2604.10703 predicts, from the first half of a layer's growth events.

The law says that Γ falls with the number of heads as exp(-K / κ²), and that a layer grows until Γ reaches its
threshold θ_w. So it stops at K* = K_0 + κ² ln(Γ(0) / θ_w), where Γ(0) was measured with K_0 heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import StatisticsError, linear_regression

from pretrain.growth.record import GrowthState

FEWEST_EVENTS = 3
"""A slope is not estimated from fewer growth events of a layer."""


@dataclass(frozen=True)
class Prediction:
    """The predicted and the observed head count of a layer."""

    layer: int
    observed: int
    events: int
    """Growth events of the layer."""
    fitted: int = 0
    """The first of them, from which κ² was estimated."""
    kappa_squared: float | None = None
    """In heads: Γ falls by the factor e over so many."""
    predicted: float | None = None
    """K*, a head count with a fraction."""
    why_not: str = ""
    """Why there is no prediction."""

    relative_error: float | None = None
    """(predicted - observed) / observed."""


def predict(record: GrowthState, heads: Sequence[int]) -> list[Prediction]:
    """Predict every layer's head count from the first half of its growth events, at least FEWEST_EVENTS of
    them.

    ln Γ against the number of heads that it was measured with has the least-squares slope -1 / κ². Γ(0) is
    that of the layer's first growth event, and K_0 the number of heads before it: the start, unless heads
    were pruned before. With fewer than six events the first three are more than half of them; ``fitted`` says
    how many were used.

    Args:
        record: what the checkpoint says.
        heads: observed head count of each layer.
    """
    return [_predict(record, layer, observed) for layer, observed in enumerate(heads)]


def _predict(record: GrowthState, layer: int, observed: int) -> Prediction:
    own = [event for event in record.list_made() if event.layer == layer]
    grown = [(event.heads - 1, event.gamma) for event in own if event.kind == "grow"]

    def none(why: str) -> Prediction:
        return Prediction(layer, observed, len(grown), why_not=why)

    if len(grown) < FEWEST_EVENTS:
        return none(f"fewer than {FEWEST_EVENTS} growth events")
    threshold = record.layers[layer].thresholds
    if threshold is None or not (threshold[0] > 0 and math.isfinite(threshold[0])):
        return none("no threshold θ_w above zero")
    first = grown[: max(FEWEST_EVENTS, len(grown) // 2)]
    if not all(gamma > 0 and math.isfinite(gamma) for _, gamma in first):
        return none("a Γ that is not above zero")
    counts, gammas = zip(*first, strict=True)
    fall = 0.0
    with suppress(StatisticsError):  # all counts are the same
        fall = linear_regression(counts, [math.log(gamma) for gamma in gammas]).slope
    if fall >= 0:
        return none(f"Γ does not fall over the first {len(first)} growth events")
    heads, gamma = first[0]
    predicted = heads - math.log(gamma / threshold[0]) / fall
    error = (predicted - observed) / observed
    return Prediction(layer, observed, len(grown), len(first), -1 / fall, predicted, relative_error=error)
