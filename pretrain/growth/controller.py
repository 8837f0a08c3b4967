"""Decides which layers get a head and which lose one, from what their layers measure. Pure arithmetic, on one rank."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pretrain.growth.record import Change, Event, GrowthState
from pretrain.growth.settings import GrowthConfig
from pretrain.growth.spectrum import Extremes, extended, extremes, projected

SMALLEST_SHARE = 1e-6
"""Of a layer's energy: eigenvalues below it are rounding, whatever the threshold is."""


@dataclass(frozen=True)
class LayerMeasure:
    """What a check has measured of one layer."""

    residual: Tensor
    """A_res [d, d], fp32."""
    gamma: float
    """‖A_res‖_F"""
    extremes: Extremes
    energies: list[float]
    """‖C M_a,h‖_F of every head."""


@dataclass
class Decision:
    """What is to change, with the directions of new heads (fp32 [2, d]: top and bottom of the residual energy)."""

    changes: list[Change] = field(default_factory=list)
    directions: dict[Change, Tensor] = field(default_factory=dict)


class Controller:
    """Applies a criterion, check after check.

    Args:
        config: the run's.
        most: most heads of a layer.
        seed: of the run, for the criterion random.
    """

    def __init__(self, config: GrowthConfig, most: int, seed: int) -> None:
        self.config, self.most, self.seed = config, most, seed

    def decide(
        self,
        step: int,
        heads: Sequence[int],
        state: GrowthState,
        measures: Sequence[LayerMeasure],
        captured: list[Tensor],
        norms: Mapping[int, float],
    ) -> Decision:
        """Count a check, and decide. Moves *state* on, and appends the directions of new heads to *captured*.

        Args:
            step: steps done.
            heads: of every layer now.
            measures: of every layer.
            captured: directions [k, d] of every layer.
            norms: by layer, the gradient norm of the heads that ``candidates`` returned.
        """
        state.checks += 1
        self._calibrate(state, measures)
        self._count_below(state, measures)
        waiting = [state.wait[layer] > 0 for layer in range(len(heads))]
        state.wait = [max(0, count - 1) for count in state.wait]
        decision = Decision()
        for layer, count in self._growing(step, heads, state, measures, waiting, norms):
            for _ in range(count):
                if self._budget_left(heads, decision) > 0:
                    self._grow(layer, step, heads, state, measures[layer], captured, decision)
        if self.config.criterion == "incrt":
            grown = {change.layer for change in decision.changes}
            for layer, head in self._pruned(heads, state, measures, waiting):
                if layer not in grown:
                    self._prune(layer, head, step, heads, state, measures[layer], decision)
        state.pending = list(decision.changes)
        return decision

    def candidates(
        self,
        heads: Sequence[int],
        state: GrowthState,
        measures: Sequence[LayerMeasure],
        captured: Sequence[Tensor],
    ) -> dict[Change, Tensor | None]:
        """The heads whose gradients the next ``decide`` compares, with their directions; of other criteria none."""
        if self.config.criterion != "gradient" or state.checks + 1 < self.config.calibration:
            return {}
        return {
            Change(layer, heads[layer], "grow"): self._directions(
                self._pair(measures[layer], captured[layer])
            )
            for layer in self._free(heads, state, measures)
        }

    # ---------------------------------------------------------------------- thresholds

    def _calibrate(self, state: GrowthState, measures: Sequence[LayerMeasure]) -> None:
        """Set the thresholds: shares of the median Γ of the calibration, as the paper's code does, or as given.

        They follow from the settings at every check, so that a run may go on with others; the calibration is not made
        again. φ_g is at most θ_w: a head that was just added must not be pruned at once.
        """
        config = self.config
        for layer, measure in enumerate(measures):
            seen = state.calibration[layer]
            if len(seen) < config.calibration:
                seen.append(measure.gamma)
            grow = config.grow_above
            if grow is None:
                if len(seen) < config.calibration:
                    continue
                grow = config.grow_share * statistics.median(seen)
            prune = config.prune_share * grow if config.prune_below is None else config.prune_below
            state.thresholds[layer] = (grow, min(prune, grow))

    def _count_below(self, state: GrowthState, measures: Sequence[LayerMeasure]) -> None:
        for layer, measure in enumerate(measures):
            thresholds = state.thresholds[layer]
            if thresholds is not None:
                state.below[layer] = [
                    count + 1 if energy < thresholds[1] else 0
                    for count, energy in zip(state.below[layer], measure.energies, strict=True)
                ]

    # ---------------------------------------------------------------------- criteria

    def _growing(
        self,
        step: int,
        heads: Sequence[int],
        state: GrowthState,
        measures: Sequence[LayerMeasure],
        waiting: Sequence[bool],
        norms: Mapping[int, float],
    ) -> list[tuple[int, int]]:
        """Layers that grow, the most urgent first, and by how many heads."""
        criterion, together = self.config.criterion, self.config.layers == "together"
        free = self._free(heads, state, measures)
        if criterion == "schedule":
            targets = self.config.counts().get(step, tuple(heads))
            return [(layer, max(0, targets[layer] - heads[layer])) for layer in free]
        if criterion == "incrt":
            urgency = [self._urgency(state, layer, measure) for layer, measure in enumerate(measures)]
            if together:
                ready = not any(waiting) and statistics.median(urgency) > 1
                return [(layer, 1) for layer in free] if ready else []
            asking = [layer for layer in free if urgency[layer] > 1 and not waiting[layer]]
            return [(layer, 1) for layer in sorted(asking, key=lambda layer: -urgency[layer])]
        # The others have no threshold; they wait for the calibration, so that all criteria begin at its last check.
        if state.checks < self.config.calibration or not free:
            return []
        if together:
            return [(layer, 1) for layer in free]
        if criterion == "random":
            return [(random.Random(f"{self.seed}/{step}").choice(free), 1)]
        return [(max(free, key=lambda layer: norms[layer]), 1)]

    def _free(self, heads: Sequence[int], state: GrowthState, measures: Sequence[LayerMeasure]) -> list[int]:
        """Layers that may grow: below the most heads, fewer than d heads added so far, and the budget not spent."""
        if self._budget_left(heads, Decision()) <= 0:
            return []
        return [
            layer
            for layer, count in enumerate(heads)
            if count < self.most and state.grown[layer] < len(measures[layer].residual)
        ]

    def _urgency(self, state: GrowthState, layer: int, measure: LayerMeasure) -> float:
        """λ_max over its threshold; 0 before there is one, and where λ_max is nothing but rounding."""
        thresholds = state.thresholds[layer]
        largest = measure.extremes.largest
        if thresholds is None or largest <= SMALLEST_SHARE * measure.gamma:
            return 0.0
        return largest / thresholds[0]

    def _pruned(
        self,
        heads: Sequence[int],
        state: GrowthState,
        measures: Sequence[LayerMeasure],
        waiting: Sequence[bool],
    ) -> list[tuple[int, int]]:
        """Layers that lose a head, and which: the one of least energy of those below φ_g for long enough."""
        found = []
        for layer, counts in enumerate(state.below):
            ready = [head for head, count in enumerate(counts) if count >= self.config.patience]
            if ready and heads[layer] > 1 and not waiting[layer]:
                found.append((layer, min(ready, key=measures[layer].energies.__getitem__)))
        return found if self.config.layers == "per_layer" or len(found) == len(heads) else []

    # ---------------------------------------------------------------------- changes

    def _budget_left(self, heads: Sequence[int], decision: Decision) -> float:
        if self.config.budget is None:
            return float("inf")
        return self.config.budget - sum(heads) - len(decision.changes)

    def _pair(self, measure: LayerMeasure, captured: Tensor) -> Extremes | None:
        """Top and bottom of what is left of A_res beside *captured*; None where nothing is."""
        pair = extremes(projected(measure.residual.cpu(), captured), measure.extremes.top)
        return pair if pair.largest > SMALLEST_SHARE * measure.gamma else None

    def _directions(self, pair: Extremes | None) -> Tensor | None:
        """What q and k of a new head lie along, [2, d]; None for a head that is drawn."""
        if pair is None or self.config.new_heads == "random":
            return None
        return torch.stack([pair.top, pair.bottom])

    def _grow(
        self,
        layer: int,
        step: int,
        heads: Sequence[int],
        state: GrowthState,
        measure: LayerMeasure,
        captured: list[Tensor],
        decision: Decision,
    ) -> None:
        before = heads[layer] + sum(change.layer == layer for change in decision.changes)
        change = Change(layer, before, "grow")
        pair = self._pair(measure, captured[layer])
        if pair is not None:  # the direction is captured, however the head is drawn
            captured[layer] = extended(captured[layer], pair.top)
        if (directions := self._directions(pair)) is not None:
            decision.directions[change] = directions
        decision.changes.append(change)
        state.grown[layer] += 1
        state.below[layer].append(0)
        self._note(change, before + 1, step, state, measure)

    def _prune(
        self,
        layer: int,
        head: int,
        step: int,
        heads: Sequence[int],
        state: GrowthState,
        measure: LayerMeasure,
        decision: Decision,
    ) -> None:
        change = Change(layer, head, "prune")
        decision.changes.append(change)
        del state.below[layer][head]
        self._note(change, heads[layer] - 1, step, state, measure)

    def _note(self, change: Change, heads: int, step: int, state: GrowthState, measure: LayerMeasure) -> None:
        state.wait[change.layer] = self.config.dwell
        state.events.append(
            Event(
                step, change.layer, change.head, change.kind, heads, measure.gamma, measure.extremes.largest
            )
        )
