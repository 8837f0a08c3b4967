"""What growth remembers from one session to the next: the record of that name in a checkpoint's
TrainingState."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from model.config import ModelConfig
from model.declared import NonNegativeInt, PositiveInt, declared, from_dict, to_dict
from model.errors import UserError
from pretrain.checkpoint.state import TrainingState

NAME = "growth"
DIRECTIONS = "growth/directions/"


@declared("growth.pending")
class Change:
    """A head that is added to a layer or pruned."""

    layer: NonNegativeInt
    head: NonNegativeInt
    """Index among the layer's heads: of a new one that it gets, of a pruned one that it has. Changes are made
    one after the other."""
    kind: Literal["grow", "prune"]

    @property
    def directions(self) -> str:
        """Name of the pair of directions of a new head among a checkpoint's features."""
        return f"{DIRECTIONS}layer_{self.layer}/head_{self.head}"


@declared("growth.events")
class Event:
    """A change of a layer's head count."""

    step: NonNegativeInt
    layer: NonNegativeInt
    head: NonNegativeInt
    kind: Literal["grow", "prune"]
    heads: NonNegativeInt
    """The layer's head count after the event."""
    gamma: float
    """The Γ that led to the event, measured with the heads before it."""
    lambda_max: float
    """The λ_max that led to the event."""


@declared("growth.layers", frozen=False)
class LayerState:
    """What checks remember of a layer."""

    below: list[NonNegativeInt]
    """By head: checks in a row below φ_g."""
    calibration: list[float] = field(default_factory=list)
    """Γ of the checks before the thresholds were set."""
    thresholds: tuple[float, float] | None = None
    """(θ_w, for λ_max; φ_g, for the energy of a head), or None before they are set."""
    wait: NonNegativeInt = 0
    """Checks that the layer still waits after a change."""
    grown: NonNegativeInt = 0
    """Heads that were ever added: at most d, one for each direction."""


@declared("growth", frozen=False)
class GrowthState:
    """What checks remember."""

    start: PositiveInt = 1
    """Heads of a layer when growth began (the mean, for a run that had its own schedule)."""
    checks: NonNegativeInt = 0
    layers: list[LayerState] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """All changes so far, in order of step."""
    pending: list[Change] = field(default_factory=list)
    """Changes decided at the checkpoint's step and not made yet; empty but in checkpoints written for an
    event."""

    @classmethod
    def begin(cls, heads: Sequence[int]) -> GrowthState:
        """The state before the first check of a model with these heads."""
        return cls(round(statistics.mean(heads)), layers=[LayerState([0] * count) for count in heads])

    @classmethod
    def from_state(cls, state: TrainingState) -> GrowthState | None:
        """What a checkpoint's state says; None for a run whose heads never changed.

        Raises:
            UserError: the record holds something else, or does not describe its model.
        """
        values = state.record(NAME)
        if not values:
            return None
        found = from_dict(cls, values, "checkpoint: records in state.json", NAME)
        layers = len(ModelConfig.from_json(state.model).heads)
        if any(event.layer >= layers for event in found.events) or len(found.layers) != layers:
            raise UserError(
                f"checkpoint: growth in state.json is not of a model of {layers} layers; restore the file"
            )
        return found

    @classmethod
    def read(cls, state: TrainingState, heads: Sequence[int]) -> GrowthState:
        """The state of a run that grows, whose model has these heads now.

        Raises:
            UserError: as ``from_state``, and if it is of other heads.
        """
        found = cls.from_state(state)
        assert found is not None
        if [len(layer.below) for layer in found.layers] != list(heads):
            raise UserError(
                "checkpoint: growth in state.json does not describe the model's heads; restore it, or "
                "continue without growth (--growth.criterion none --growth.schedule '{}')"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """What ``from_state`` and ``read`` read."""
        return to_dict(self)

    def list_made(self) -> list[Event]:
        """The events without those that are pending, which are not in the checkpoint's model yet."""
        return self.events[: max(0, len(self.events) - len(self.pending))]
