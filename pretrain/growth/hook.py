"""The hook that measures every layer at an interval, decides, and hands the trainer the model to continue
with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.declared import from_dict
from model.errors import UserError
from model.heads import format_heads
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.config.sections import length_in_steps
from pretrain.growth.check import Check, LayerMeasure
from pretrain.growth.edit import apply_changes, candidate
from pretrain.growth.measure import gradient_norms, query_and_key_weights, second_moments
from pretrain.growth.models import check_every_split
from pretrain.growth.record import NAME, Change, GrowthState
from pretrain.growth.spectrum import extremes, head_energies, residual, skew_product
from pretrain.run.hooks import Hook, HookResult
from pretrain.run.session import Session
from pretrain.utils.format import log_line

STAY = "the heads stay as they are"
MOMENT = "growth/second_moment/layer_"
CAPTURED = "growth/captured/layer_"
TOP = "growth/top/layer_"
LEAST_INTERVAL = {"incrt": 24, "random": 24, "gradient": 60, "schedule": 1}
"""Fewest steps between checks, by criterion, where the interval is a share of the run. Then checks take less
than 3 % of the time even in small models: one costs up to two thirds of a step, a ``gradient`` one 1.7."""


class Growth(Hook):
    """Hook that adds and prunes heads.

    In a run that continues without growth it keeps the record of growth, in case it is turned on again.

    Args:
        session: the run's. A check reads this rank's part of the next step's sequences.

    Raises:
        UserError: ``growth.interval`` or ``growth.until`` is no length in the run, or an option does not go
            with the criterion.
    """

    name = NAME

    def __init__(self, session: Session) -> None:
        run, config = session.run, session.run.growth
        self.session, self.model, self.world = session, session.model_config, session.world
        # Written down before the first check: a run that continues without growth keeps its heads.
        session.state.records.setdefault(
            NAME, Record(GrowthState.begin(session.model_config.heads).to_json(), needed=True)
        )
        self.config = config
        # A run that continues may have more than its preset.
        self.most = config.maximum or max(run.most_heads(), *session.model_config.heads)
        self.every = length_in_steps("growth.interval", config.interval, run.steps)
        if config.interval < 1:
            self.every = max(self.every, LEAST_INTERVAL.get(config.criterion, 1))
        checks = 1 if config.criterion == "incrt" and config.grow_above is not None else config.calibration
        # A run that continues has made some, and a run may begin to grow late.
        known = from_dict(GrowthState, session.state.record(NAME), "checkpoint: records in state.json", NAME)
        left = max(1, checks - known.checks)
        self.first = (session.state.step // self.every + left) * self.every
        self.last = min(run.steps - 1, length_in_steps("growth.until", config.until, run.steps))
        if config.criterion == "gradient" and run.activation_checkpointing:
            raise UserError(
                "growth.criterion: gradient needs activations; leave out activation_checkpointing true"
            )
        if config.active:
            check_every_split(run, self.model, session.batch.micro_batch)
        layers = self.model.num_layers
        self._moments: list[Tensor | None] = [None] * layers
        self._captured = [torch.zeros(0, width) for width in self.model.block_widths]
        self._top: list[Tensor | None] = [None] * layers
        self._directions: dict[Change, Tensor] = {}

    def is_due(self, step: int) -> bool:
        """Whether to check after this many steps: at the interval, or at the steps of a schedule."""
        if self.config.criterion == "schedule":
            return step in self.config.schedule
        return self.config.active and step <= self.last and step % self.every == 0

    def _list_kept(self) -> tuple[tuple[str, list[Any], int], ...]:
        """What is kept of every layer: the beginning of its name, the tensors, and their dimensions."""
        return (MOMENT, self._moments, 2), (CAPTURED, self._captured, 2), (TOP, self._top, 1)

    def state(self) -> dict[str, Tensor]:
        """Second moments, captured directions, the last eigenvectors, and the directions of pending heads."""
        named = {f"{name}{layer}": t for name, kept, _ in self._list_kept() for layer, t in enumerate(kept)}
        directions = {change.directions: pair for change, pair in self._directions.items()}
        return {name: tensor.cpu() for name, tensor in named.items() if tensor is not None} | directions

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of ``state``; directions of pending heads are read where their weights are
        made."""
        for name, kept, dimensions in self._list_kept():
            for layer, width in enumerate(self.model.block_widths):
                tensor = tensors.get(f"{name}{layer}", torch.empty(0))
                if tensor.ndim == dimensions and tensor.shape[-1] == width:
                    kept[layer] = tensor

    def model_changed(self, model: ModelConfig) -> None:
        """Continue with other heads."""
        self.model, self._directions = model, {}

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Measure and decide. Collective; no training number changes.

        Returns:
            ``growth/…`` values of every layer, a line for each change, and the model to continue with if it
            changes.
        """
        if not self.config.active:  # pending from a session that still had growth
            return HookResult()
        # The whole step's: a part that the ranks and their micro-batches determine would let events depend on
        # the machine.
        passes = range(self.session.batch.accumulation)
        batches = [self.session.micro_batch(state.sequences, index) for index in passes]
        moments = second_moments(engine, batches, self.world)
        if not all(bool(moment.isfinite().all()) for moment in moments):
            return HookResult(
                lines=[f"growth   step {state.step:,}: not checked; activations are not finite"]
            )
        share = self.config.average
        for layer, moment in enumerate(moments):
            if (before := self._moments[layer]) is not None:
                moment = share * before.to(moment) + (1 - share) * moment
            self._moments[layer] = moment
        weights = query_and_key_weights(engine, self.model, self.world)
        growth, check = GrowthState.read(state, self.model.heads), None
        if self.world.is_main:  # rank 0 decides for all
            of_run = (self.config, self.most, self.session.run.seed)
            check = Check(*of_run, [*self.model.heads], growth, self._measure(weights), self._captured)
        compared = self.world.broadcast(check.candidates() if check else {})
        new_heads = {
            change.layer: candidate(self.model, self.session.run.seed, state.step, change, directions)
            for change, directions in compared.items()
        }
        norms = gradient_norms(engine, batches, new_heads, self.world) if new_heads else {}
        directions: dict[Change, Tensor] = {}
        found: dict[str, Any] = {}
        if check:
            directions = check.decide(state.step, norms)
            found = self._values(check, norms)
        shared = (growth, directions, found, self._captured, self._top)
        growth, self._directions, found, self._captured, self._top = self.world.broadcast(shared)
        state.records[NAME] = Record(growth.to_json(), needed=True)
        if not growth.pending:
            return HookResult(found)
        model = apply_changes(self.model, growth.pending)
        return HookResult(found, [self._line(growth.pending, model, state.step)], model)

    def announce(self, session: Session) -> list[str]:
        """What asks for heads, when, and how far they may go."""
        config = self.config
        if not config.active:
            return []
        when = f"checked every {self.every} steps up to {self.last:,}, decided from step {self.first:,} on"
        note = ""
        if config.schedule:
            counts, done = config.counts(len(self.model.heads)), session.state.step
            when, last = f"at steps {', '.join(map(str, counts))}", max(counts)
            missed = zip(counts[last], self.model.heads, strict=True)
            if last <= done and any(asked > has for asked, has in missed):
                note = f"{STAY}: the steps of growth.schedule are before step {done:,}; give later ones"
        elif self.first > self.last:
            note = f"{STAY}: the last check, at step {self.last:,}, comes before the first decision; "
            note += "give growth.interval in steps, less growth.calibration, or more steps"
        elif min(self.model.heads) >= self.most or (config.budget or math.inf) <= sum(self.model.heads):
            note = f"{STAY}: no head can be added"
            if config.criterion == "incrt":
                note = "no head can be added until one is pruned"
            note += "; give more growth.maximum, or growth.budget"
        budget = f", {config.budget} in all" if config.budget else ""
        lines = [f"growth   {config.criterion}: at most {self.most} heads a layer{budget}; {when}"]
        return [*lines, *([log_line("note", note)] if note else [])]

    # ---------------------------------------------------------------------- parts

    def _measure(self, weights: Mapping[str, Tensor]) -> list[LayerMeasure]:
        measures = []
        for layer, moment in enumerate(self._moments):
            assert moment is not None
            query, key = (weights[f"layers.{layer}.attention.{part}.weight"].to(moment) for part in "qk")
            energy = residual(moment, skew_product(query, key), self._captured[layer].to(moment))
            found = extremes(energy, self._top[layer])
            self._top[layer] = found.top
            measures.append(
                LayerMeasure(
                    residual=energy,
                    gamma=torch.linalg.matrix_norm(energy).item(),
                    extremes=found,
                    energies=head_energies(moment, query, key, self.model.layer_head_dim(layer)),
                )
            )
        return measures

    def _values(self, check: Check, norms: Mapping[int, float]) -> dict[str, Any]:
        """The measurements, and the heads that the run continues with."""
        values: dict[str, Any] = {f"growth/gradient/layer_{layer}": norm for layer, norm in norms.items()}
        for layer, measure in enumerate(check.measures):
            values[f"growth/heads/layer_{layer}"] = check.heads[layer]
            values[f"growth/gamma/layer_{layer}"] = measure.gamma
            values[f"growth/lambda_max/layer_{layer}"] = measure.extremes.largest
            values[f"growth/weakest_head/layer_{layer}"] = min(measure.energies)
        return values

    def _line(self, changes: Sequence[Change], model: ModelConfig, step: int) -> str:
        """A one-line summary of the changes; growth.events holds them with values."""
        parts = []
        for kind, words in (("grow", "added one head to"), ("prune", "pruned one of")):
            layers = [str(change.layer) for change in changes if change.kind == kind]
            parts += [f"{words} layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}"] if layers else []
        heads = f"{format_heads(model.heads)}, {model.num_parameters():,} parameters"
        return f"growth   step {step:,}: {'; '.join(parts)}; heads {heads}"
