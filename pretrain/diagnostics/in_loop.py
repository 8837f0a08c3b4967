"""Measures a run every N steps while it trains, on held-out windows, without changing the training
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import parameter_specs
from pretrain.checkpoint.state import TrainingState
from pretrain.config.sections import step_of_run
from pretrain.diagnostics.forward import ForwardProbe, lower_layers
from pretrain.diagnostics.weights import (
    OwnWeights,
    Pieces,
    displacement_row,
    engine_update_row,
    initial_weights,
    kept_path,
    projections,
    read_kept,
    write_kept,
)
from pretrain.optim.groups import GroupRates
from pretrain.run.hooks import Hook, HookResult
from pretrain.run.session import Session
from pretrain.utils.format import log_line

FEATURE = "diagnostics/layer_"


class Diagnostics(Hook):
    """Hook that measures attention, residual writes and weights every ``diagnostics_every`` steps.

    Args:
        session: the run's. With ``diagnostics_every`` 0, only W_Q and W_K at the release are kept.

    Raises:
        UserError: ``diagnostics.release`` is not a step of the run, or there is no held-out window to measure
            on (a run without validation then has no diagnostics, which ``notes`` says).
    """

    name = "diagnostics"

    def __init__(self, session: Session) -> None:
        run = session.run
        self.session, self.model, self.world = session, session.model_config, session.world
        self.dtype = torch.bfloat16 if session.decisions.bf16 else torch.float32
        self.specs = parameter_specs(session.model_config)
        self._release: int | None = None
        if run.diagnostics.release is not None:
            self._release = step_of_run("diagnostics.release", run.diagnostics.release, run.steps)
        self._rule = find_slowing_rule(session.rates)
        self.notes: list[str] = []
        self._probe: ForwardProbe | None = None
        if run.diagnostics_every:
            try:
                windows = session.validation_windows(run.diagnostics.sequences)
                batch, positions = session.batch.micro_batch, run.diagnostics.positions
                self._probe = ForwardProbe(self.model, windows, batch, self.world, positions)
            except UserError as error:
                if run.validation.every:
                    raise
                self.notes.append(f"no diagnostics: {error}")
        self._features: dict[int, Tensor] = {}
        self._initial: Pieces | None = None
        self._release_weights: tuple[int, Pieces] | None = None

    # ---------------------------------------------------------------------- the trainer's part

    def is_due(self, step: int) -> bool:
        """Whether to measure after this many steps."""
        return self._probe is not None and step % self.session.run.diagnostics_every == 0

    def state(self) -> dict[str, Tensor]:
        """Tensors for the checkpoint, so that the first drift after a resume is that of an uninterrupted
        run."""
        return {f"{FEATURE}{layer}": features for layer, features in self._features.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of ``state``, which are used if windows and positions are still the same."""
        for name, features in tensors.items():
            # Those of other windows or positions have another shape, and are not used.
            if name.startswith(FEATURE) and (layer := name.removeprefix(FEATURE)).isdecimal():
                self._features[int(layer)] = features

    def model_changed(self, model: ModelConfig) -> None:
        """Measure a model of other heads; the displacement of W_Q and W_K from weights of other shapes is
        not reported."""
        self.model, self.specs = model, parameter_specs(model)
        self._initial = self._release_weights = None
        if self._probe is not None:
            self._probe.config = model

    def announce(self, session: Session) -> list[str]:
        """Why something is not measured, if so."""
        notes, step = [*self.notes], self._release
        if (
            step is not None
            and step < session.state.step
            and not kept_path(session.run.folder, step).exists()
        ):
            notes.append(f"diagnostics.release: step {step:,} is past, and its weights were not kept")
        if step == session.run.steps:
            notes.append(f"diagnostics.release: step {step:,} is the last, so no weights are kept")
        return [log_line("note", note) for note in notes]

    def release_step(self, state: TrainingState) -> int | None:
        """The step whose W_Q and W_K are the reference of the second displacement, once it is known."""
        if self._release is not None or self._rule is None:
            return self._release
        return self.session.rates.rules[self._rule].release_step(state.released.get(self._rule))

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Keep W_Q and W_K in the run's folder when the step about to be attempted is the first after the
        slow-down.

        Collective.

        Returns:
            A line that says where they were kept, or why they were not.
        """
        if state.step != self.release_step(state):
            return HookResult()
        rank_weights = self._rank_weights(engine)
        self._release_weights = (state.step, rank_weights.copy())
        tensors = {
            name: weight for name, weight in rank_weights.gather_full(self.world) if self.world.is_main
        }
        path = kept_path(self.session.run.folder, state.step)
        problem = write_kept(path, tensors) if self.world.is_main else None
        if problem := self.world.first_problem(problem):
            return HookResult(lines=[f"warning: {problem}"])
        return HookResult(lines=[f"release  W_Q and W_K of step {state.step:,} kept in {path}"])

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """Return all values, as ``diagnostics/…``. Collective; weights and random states do not change."""
        if self._probe is None:  # pending from a session that still had diagnostics
            return HookResult()
        result = self._probe.run(engine, lower_layers(self.model.num_layers))
        values = result.row(self._features)
        self._features = result.features
        rank_weights = self._rank_weights(engine)
        if state.from_seed:
            if self._initial is None:
                self._initial = rank_weights.take_pieces(
                    initial_weights(self.model, self.specs, self.session.run.seed, self.dtype)
                )
            values |= displacement_row(rank_weights.displacements(self._initial), "initial")
        at_release = self._weights_at_release(rank_weights, state)
        if at_release is not None:
            values |= displacement_row(rank_weights.displacements(at_release), "release")
        return HookResult(values | engine_update_row(engine, self.specs))

    # ---------------------------------------------------------------------- parts

    def _rank_weights(self, engine: Any) -> OwnWeights:
        return OwnWeights(engine, projections(self.model), self.specs)

    def _weights_at_release(self, rank_weights: OwnWeights, state: TrainingState) -> Pieces | None:
        """This rank's pieces of the weights at the release, once it is past; from the run's folder after a
        resume."""
        step = self.release_step(state)
        if step is None or state.step < step:
            return None
        if self._release_weights is None or self._release_weights[0] != step:
            read = read_kept(kept_path(self.session.run.folder, step), self.specs, rank_weights.names)
            if self.world.first_problem(None if read else "missing"):
                return None
            assert read is not None
            self._release_weights = (step, rank_weights.take_pieces(read))
        return self._release_weights[1]


def find_slowing_rule(rates: GroupRates) -> str | None:
    """The rule whose release the second displacement refers to: the first that ends and matches a W_Q or
    W_K."""
    for name, rule in rates.rules.items():
        matched = [p for g in rates.groups.values() if g.rule and g.rule.name == name for p in g.parameters]
        if any(p.endswith((".attention.q.weight", ".attention.k.weight")) for p in matched) and (
            rule.hold is not None or rule.latest is not None
        ):
            return name
    return None
