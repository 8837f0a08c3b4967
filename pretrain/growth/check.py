"""Decides which layers get a head and which lose one, from what their layers measure. Pure arithmetic, on one
rank."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.config.growth import GrowthConfig
from pretrain.growth.record import Change, Event, GrowthState
from pretrain.growth.spectrum import Extremes, extend_basis, extremes, project_out

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
class Check:
    """One check: applies the criterion to what was measured. Moves ``heads``, ``state`` and ``captured`` on.

    Args:
        most: most heads of a layer.
        seed: of the run, for the criterion random.
        heads: of every layer now.
        measures: of every layer.
        captured: directions [k, d] of every layer; those of new heads are appended.
    """

    config: GrowthConfig
    most: int
    seed: int
    heads: list[int]
    state: GrowthState
    measures: Sequence[LayerMeasure]
    captured: list[Tensor]

    def candidates(self) -> dict[Change, Tensor | None]:
        """The heads whose gradients ``decide`` compares, with their directions; of other criteria none."""
        if self.config.criterion != "gradient" or self.state.checks + 1 < self.config.calibration:
            return {}
        return {
            Change(layer, self.heads[layer], "grow"): self._directions(self._pair(layer))
            for layer in self._free()
        }

    def decide(self, step: int, norms: Mapping[int, float]) -> dict[Change, Tensor]:
        """Count the check, and decide; what is to change is pending then.

        Args:
            step: steps done.
            norms: by layer, the gradient norm of the heads that ``candidates`` returned.

        Returns:
            The directions of new heads: fp32 [2, d], top and bottom of the residual energy.
        """
        state, found = self.state, {}
        state.checks += 1
        state.pending = []
        self._calibrate()
        self._count_below()
        waiting = [layer.wait > 0 for layer in state.layers]
        for known in state.layers:
            known.wait = max(0, known.wait - 1)
        # Among the heads that were measured, before new ones are added.
        pruned = self._choose_pruned(waiting) if self.config.criterion == "incrt" else []
        for layer in self._choose_growing(step, waiting, norms):
            if self._budget_left() <= 0:
                break
            change = Change(layer, self.heads[layer], "grow")
            pair = self._pair(layer)
            if pair is not None:  # the direction is captured, however the head is drawn
                self.captured[layer] = extend_basis(self.captured[layer], pair.top)
            if (directions := self._directions(pair)) is not None:
                found[change] = directions
            state.layers[layer].grown += 1
            state.layers[layer].below.append(0)
            self._note(change, step)
        grown = {change.layer for change in state.pending}
        for layer, head in pruned:
            if layer not in grown:
                del state.layers[layer].below[head]
                self._note(Change(layer, head, "prune"), step)
        return found

    def _note(self, change: Change, step: int) -> None:
        layer, kind = change.layer, change.kind
        self.heads[layer] += 1 if kind == "grow" else -1
        self.state.layers[layer].wait = self.config.dwell
        measure = self.measures[layer]
        values = (self.heads[layer], measure.gamma, measure.extremes.largest)
        self.state.events.append(Event(step, layer, change.head, kind, *values))
        self.state.pending.append(change)

    # ---------------------------------------------------------------------- thresholds

    def _calibrate(self) -> None:
        """Set the thresholds: shares of the median Γ of the calibration, as the paper's code does, or as
        given.

        They follow from the settings at every check, so that a run may resume with others; the calibration is
        not repeated. φ_g is at most θ_w: a head that was just added must not be pruned at once.
        """
        config = self.config
        for layer, measure in zip(self.state.layers, self.measures, strict=True):
            seen = layer.calibration
            if len(seen) < config.calibration:
                seen.append(measure.gamma)
            grow = config.grow_above
            if grow is None:
                if len(seen) < config.calibration:
                    continue
                grow = config.grow_share * statistics.median(seen)
            prune = config.prune_share * grow if config.prune_below is None else config.prune_below
            layer.thresholds = (grow, min(prune, grow))

    def _count_below(self) -> None:
        for layer, measure in zip(self.state.layers, self.measures, strict=True):
            if layer.thresholds is not None:
                least, counts = layer.thresholds[1], zip(layer.below, measure.energies, strict=True)
                layer.below = [count + 1 if energy < least else 0 for count, energy in counts]

    # ---------------------------------------------------------------------- criteria

    def _choose_growing(self, step: int, waiting: Sequence[bool], norms: Mapping[int, float]) -> list[int]:
        """Layers that get a head, the most urgent first; a layer comes as often as it gets one."""
        criterion, free = self.config.criterion, self._free()
        if criterion == "schedule":
            targets = self.config.counts(len(self.heads)).get(step, tuple(self.heads))
            return [layer for layer in free for _ in range(targets[layer] - self.heads[layer])]
        if criterion == "incrt":
            urgency = [self._urgency(layer) for layer in range(len(self.heads))]
            asking = [layer for layer in free if urgency[layer] > 1 and not waiting[layer]]
            return sorted(asking, key=lambda layer: -urgency[layer])
        # The others have no threshold; they wait for the calibration, so that all criteria begin at its last
        # check.
        if self.state.checks < self.config.calibration or not free:
            return []
        if criterion == "random":
            return [random.Random(f"{self.seed}/{step}").choice(free)]
        return [max(free, key=lambda layer: norms[layer])]

    def _free(self) -> list[int]:
        """Layers that may grow: below the most heads, fewer than d heads added so far, and the budget not
        spent."""
        return [
            layer
            for layer, count in enumerate(self.heads)
            if count < self.most
            and self.state.layers[layer].grown < len(self.measures[layer].residual)
            and self._budget_left() > 0
        ]

    def _budget_left(self) -> float:
        return float("inf") if self.config.budget is None else self.config.budget - sum(self.heads)

    def _urgency(self, layer: int) -> float:
        """λ_max over its threshold; 0 before there is one, and where λ_max is only rounding."""
        thresholds, measure = self.state.layers[layer].thresholds, self.measures[layer]
        largest = measure.extremes.largest
        if thresholds is None or largest <= SMALLEST_SHARE * measure.gamma:
            return 0.0
        return largest / thresholds[0]

    def _choose_pruned(self, waiting: Sequence[bool]) -> list[tuple[int, int]]:
        """Layers that lose a head, and which: the one of least energy of those below φ_g for long enough."""
        found = []
        for layer, known in enumerate(self.state.layers):
            ready = [head for head, count in enumerate(known.below) if count >= self.config.patience]
            if ready and self.heads[layer] > 1 and not waiting[layer]:
                found.append((layer, min(ready, key=self.measures[layer].energies.__getitem__)))
        return found

    # ---------------------------------------------------------------------- directions

    def _pair(self, layer: int) -> Extremes | None:
        """Top and bottom of A_res outside the captured directions; None where nothing is left."""
        measure = self.measures[layer]
        pair = extremes(project_out(measure.residual.cpu(), self.captured[layer]), measure.extremes.top)
        return pair if pair.largest > SMALLEST_SHARE * measure.gamma else None

    def _directions(self, pair: Extremes | None) -> Tensor | None:
        """What q and k of a new head lie along, [2, d]; None for a head that is drawn."""
        if pair is None or self.config.new_heads == "random":
            return None
        return torch.stack([pair.top, pair.bottom])
