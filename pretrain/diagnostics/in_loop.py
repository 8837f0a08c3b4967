"""Diagnostics while a run trains: every N steps, on held-out windows, without a trace in the training numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model.errors import UserError
from model.parameters import parameter_specs
from pretrain.checkpoint.state import TrainingState
from pretrain.diagnostics.forward import ForwardProbe, feature_drift, lower_layers
from pretrain.diagnostics.weights import (
    OwnWeights,
    Pieces,
    initial_weights,
    kept_path,
    open_kept,
    projections,
    update_sizes,
    write_kept,
)
from pretrain.optim.groups import GroupRates
from pretrain.optim.schedule import length_in_steps
from pretrain.run.context import RunContext
from pretrain.run.hooks import Hook, HookResult

FEATURE = "diagnostics/layer_"


class Diagnostics(Hook):
    """What a run measures of itself every ``diagnostics_every`` steps.

    Args:
        context: the run's. ``diagnostics_every`` 0 turns everything off but the keeping of W_Q and W_K at the release.

    Raises:
        UserError: ``diagnostics.release`` is not a step of the run, or there is no held-out window to look at (a run
            without validation goes without diagnostics then, which ``notes`` says).
    """

    name = "diagnostics"

    def __init__(self, context: RunContext) -> None:
        run = context.run
        self.context, self.settings = context, run.diagnostics
        self.model, self.world = context.model, context.world
        self.dtype = torch.bfloat16 if context.bf16 else torch.float32
        self.specs = parameter_specs(context.model)
        self._release: int | None = None
        if run.diagnostics.release is not None:
            self._release = length_in_steps("diagnostics.release", run.diagnostics.release, run.steps)
            if self._release > run.steps:
                raise UserError(
                    f"diagnostics.release: step {self._release} is beyond the run of {run.steps} steps"
                )
        self._rule = slowing_rule(context.rates)
        self.notes: list[str] = []
        self._probe: ForwardProbe | None = None
        if run.diagnostics_every:
            try:
                self._probe = self._build_probe()
            except UserError as error:
                if run.validation.every:
                    raise
                self.notes.append(f"no diagnostics: {error}")
        self._features: dict[int, Tensor] = {}
        self._initial: Pieces | None = None
        self._kept: tuple[int, Pieces] | None = None

    # ---------------------------------------------------------------------- the trainer's part

    def due(self, step: int) -> bool:
        """Whether to measure after this many steps."""
        return self._probe is not None and step % self.context.run.diagnostics_every == 0

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, so that the first drift after a resume is that of a run without a break."""
        return {f"{FEATURE}{layer}": kept for layer, kept in self._features.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` gave, as far as the same windows and positions are still looked at."""
        for name, kept in tensors.items():
            # Those of other windows or positions have another shape, and are not used.
            if name.startswith(FEATURE) and (layer := name.removeprefix(FEATURE)).isdecimal():
                self._features[int(layer)] = kept

    def release_step(self, state: TrainingState) -> int | None:
        """The step whose W_Q and W_K are the reference of the second displacement, once it is known."""
        if self._release is not None or self._rule is None:
            return self._release
        return self.context.rates.rules[self._rule].released_at(state.released.get(self._rule))

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Keep W_Q and W_K in the run's folder when the step about to be attempted is the first after the slow-down.

        Collective.

        Returns:
            A line about it: that they were kept, or why not.
        """
        if state.step != self.release_step(state):
            return HookResult()
        own = self._own(engine)
        self._kept = (state.step, own.copy())
        tensors = {}
        for name, weight in own.full(self.world):
            if self.world.is_main:
                tensors[name] = weight
        path = kept_path(self.context.run.folder, state.step)
        problem = write_kept(path, tensors) if self.world.is_main else None
        problem = self.world.agree(problem)
        if problem:
            return HookResult(lines=[f"warning: {problem}"])
        return HookResult(lines=[f"release  W_Q and W_K of step {state.step:,} kept in {path}"])

    def run(self, engine: Any, state: TrainingState) -> HookResult:
        """All figures as keys of metrics, ``diagnostics/…``. Collective; weights and random states are left alone."""
        if self._probe is None:  # pending from a session that still had diagnostics
            return HookResult()
        result = self._probe.run(engine, lower_layers(self.model.num_layers))
        row = result.row()
        for layer, features in result.features.items():
            before = self._features.get(layer)
            if before is not None and before.shape == features.shape:
                row[f"diagnostics/feature_drift/layer_{layer}"] = feature_drift(features, before)
        self._features = result.features
        own = self._own(engine)
        if state.from_seed:
            if self._initial is None:
                self._initial = own.cut(
                    initial_weights(self.model, self.specs, self.context.run.seed, self.dtype)
                )
            row |= displacement_row(own.displacements(self._initial), "initial")
        kept = self._kept_at(own, state)
        if kept is not None:
            row |= displacement_row(own.displacements(kept), "release")
        for group, (effective, relative) in update_sizes(engine, self.specs).items():
            row[f"diagnostics/effective_lr/{group}"] = effective
            row[f"diagnostics/relative_update/{group}"] = relative
        return HookResult(row)

    # ---------------------------------------------------------------------- parts

    def _build_probe(self) -> ForwardProbe:
        settings, context = self.settings, self.context
        windows, _ = context.data.validation_windows(self.model.context_length, settings.sequences)
        return ForwardProbe(self.model, windows, context.batch.micro_batch, self.world, settings.positions)

    def _own(self, engine: Any) -> OwnWeights:
        return OwnWeights(engine, projections(self.model.num_layers), self.specs)

    def _kept_at(self, own: OwnWeights, state: TrainingState) -> Pieces | None:
        """This rank's pieces of the weights at the release, once it is past; from the run's folder after a resume."""
        step = self.release_step(state)
        if step is None or state.step < step:
            return None
        if self._kept is None or self._kept[0] != step:
            read = open_kept(kept_path(self.context.run.folder, step), self.specs, own.names)
            if self.world.agree(None if read else "missing"):
                return None
            assert read is not None
            self._kept = (step, own.cut(read))
        return self._kept[1]


def slowing_rule(rates: GroupRates) -> str | None:
    """The rule whose release the second displacement refers to: the first that ends and matches a W_Q or W_K."""
    for name, rule in rates.rules.items():
        matched = [p for g in rates.groups.values() if g.rule and g.rule.name == name for p in g.parameters]
        if any(p.endswith((".attention.q.weight", ".attention.k.weight")) for p in matched) and (
            rule.hold is not None or rule.latest is not None
        ):
            return name
    return None


def displacement_row(displacements: Mapping[str, float], reference: str) -> dict[str, Any]:
    """``diagnostics/lambda_q_REFERENCE/layer_N`` from the weights' names."""
    row = {}
    for name, value in displacements.items():
        _, layer, _, part, _ = name.split(".")
        row[f"diagnostics/lambda_{part}_{reference}/layer_{layer}"] = value
    return row
