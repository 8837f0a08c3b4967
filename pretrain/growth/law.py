"""The head count that the law of arXiv 2604.10703 predicts, from the first half of a layer's growth events.

The law says that Γ falls with the number of heads as exp(-K / κ²), and that a layer grows until Γ reaches its
threshold θ_w. So it stops at K* = K_0 + κ² ln(Γ(0) / θ_w), where Γ(0) was measured with K_0 heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import UserError, shown

FEWEST_EVENTS = 3
"""A slope is not estimated from fewer growth events of a layer."""
KINDS = ("grow", "prune")


@dataclass(frozen=True)
class Event:
    """One change of a layer's head count, as the controller recorded it."""

    step: int
    layer: int
    kind: str
    """One of KINDS."""
    heads: int
    """The layer's head count after the event."""
    gamma: float
    """The Γ that led to the event, measured with the heads before it."""
    lambda_max: float
    """The λ_max that led to the event."""


@dataclass(frozen=True)
class GrowthRecord:
    """What a checkpoint says of the growth so far."""

    start: int
    """Heads of every layer at the beginning."""
    thresholds: list[tuple[float, float] | None]
    """By layer: θ_w, for λ_max, and φ_g, for the energy of a head; None where they were not set yet."""
    events: list[Event]
    """In order of step."""

    @classmethod
    def of(cls, values: Mapping[str, Any], num_layers: int) -> GrowthRecord | None:
        """Read ``growth`` of a TrainingState; None for a run that does not grow.

        Changes that are pending have not been made yet, and are left out, as they are not in the checkpoint's model.

        Raises:
            UserError: a field is missing or has another form than the controller writes.
        """
        if not values:
            return None
        start, thresholds, events = (values.get(name) for name in ("start", "thresholds", "events"))
        if type(start) is not int or start < 1:
            raise _damaged("start", start, "a head count of at least 1")
        if not isinstance(thresholds, list) or len(thresholds) != num_layers:
            raise _damaged("thresholds", thresholds, f"a list of {num_layers} entries, one a layer")
        for pair in thresholds:
            if pair is not None and not (
                isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
            ):
                raise _damaged("thresholds", pair, "[theta_w, phi_g] or null for each layer")
        if not isinstance(events, list):
            raise _damaged("events", events, "a list")
        pending = values.get("pending", [])
        if not isinstance(pending, list):
            raise _damaged("pending", pending, "a list")
        read = [_event(event, num_layers) for event in events[: max(0, len(events) - len(pending))]]
        return cls(
            start,
            [None if pair is None else (float(pair[0]), float(pair[1])) for pair in thresholds],
            sorted(read, key=lambda event: event.step),
        )

    def of_layer(self, layer: int) -> list[tuple[int, Event]]:
        """The layer's events in order, each with the layer's head count before it."""
        return [
            (event.heads - 1 if event.kind == "grow" else event.heads + 1, event)
            for event in self.events
            if event.layer == layer
        ]


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _damaged(name: str, value: object, valid: str) -> UserError:
    return UserError(f"checkpoint: growth.{name} in state.json is {shown(value)}; it must be {valid}")


def _event(values: object, num_layers: int) -> Event:
    if not isinstance(values, dict):
        raise _damaged("events", values, "a list of mappings")
    for name in ("step", "layer", "heads"):
        if type(values.get(name)) is not int or values[name] < 0:
            raise _damaged(f"events: {name}", values.get(name), "a whole number from 0")
    if values["layer"] >= num_layers:
        raise _damaged("events: layer", values["layer"], f"a layer from 0 to {num_layers - 1}")
    if values.get("kind") not in KINDS:
        raise _damaged("events: kind", values.get("kind"), " or ".join(KINDS))
    for name in ("gamma", "lambda_max"):
        if not _is_number(values.get(name)):
            raise _damaged(f"events: {name}", values.get(name), "a number")
    return Event(**{name: values[name] for name in Event.__dataclass_fields__})


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

    @property
    def relative_error(self) -> float | None:
        """(predicted - observed) / observed."""
        return None if self.predicted is None else (self.predicted - self.observed) / self.observed


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Least-squares slope of y against x; None where all x are the same."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    if not spread:
        return None
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def predict(record: GrowthRecord, heads: Sequence[int]) -> list[Prediction]:
    """Predict every layer's head count from the first half of its growth events, at least FEWEST_EVENTS of them.

    ln Γ against the number of heads that it was measured with has the least-squares slope -1 / κ². Γ(0) is that of the
    layer's first growth event, and K_0 the number of heads before it: the start, unless heads were pruned before.
    With fewer than six events the first three are more than half of them; ``fitted`` says how many were used.

    Args:
        record: what the checkpoint says.
        heads: observed head count of each layer.
    """
    return [_predict(record, layer, observed) for layer, observed in enumerate(heads)]


def _predict(record: GrowthRecord, layer: int, observed: int) -> Prediction:
    grown = [(before, event.gamma) for before, event in record.of_layer(layer) if event.kind == "grow"]

    def none(why: str) -> Prediction:
        return Prediction(layer, observed, len(grown), why_not=why)

    if len(grown) < FEWEST_EVENTS:
        return none(f"fewer than {FEWEST_EVENTS} growth events")
    threshold = record.thresholds[layer]
    if threshold is None or not (threshold[0] > 0 and math.isfinite(threshold[0])):
        return none("no threshold θ_w above zero")
    first = grown[: max(FEWEST_EVENTS, len(grown) // 2)]
    if not all(gamma > 0 and math.isfinite(gamma) for _, gamma in first):
        return none("a Γ that is not above zero")
    fall = slope([before for before, _ in first], [math.log(gamma) for _, gamma in first])
    if fall is None or fall >= 0:
        return none(f"Γ does not fall over the first {len(first)} growth events")
    heads, gamma = first[0]
    predicted = heads - math.log(gamma / threshold[0]) / fall
    return Prediction(layer, observed, len(grown), len(first), -1 / fall, predicted)
