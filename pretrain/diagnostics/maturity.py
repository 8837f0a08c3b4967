"""Release by maturity: a slow-down of the upper layers ends when the lower half of the layers has settled.

arXiv 2605.10504 releases by a "lower-layer maturity rule" that is not public. Ours:

    F_j   features at probe j: the residual stream after the lower half of the layers, normalized as the
          layers above see it (pretrain.diagnostics.forward.normalize), at fixed positions of fixed windows
    D_j   = ‖F_j − F_{j−1}‖_F / ‖F_{j−1}‖_F, the drift since the probe before, ``maturity.every`` steps before
    settled at probe j when the last ``patience`` drifts, D_j among them, are ≤ ``settled`` · max(D_1 … D_j)

The drift is measured against its own largest value, so that the rule needs no absolute scale: while the
learning rate warms up the drift grows, which keeps the largest value at the present one; then features come
to rest and it falls. A rule of the learning rates is released at the first step at which the lower half is
settled, no earlier than its ``hold`` and no later than its ``latest`` (12 % of the run in that paper; there
it fired at 3 to 6 %).

A probe is a forward pass at a step that the run's configuration fixes: the decision is a function of the
weights, the same on every rank and after a resume, and it changes no training number but the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.declared import NonNegativeInt, declared, from_dict, to_dict
from pretrain.checkpoint.state import Record, TrainingState
from pretrain.config.sections import MaturityConfig, length_in_steps
from pretrain.diagnostics.forward import ForwardProbe, feature_drift, lower_layers
from pretrain.run.hooks import Hook, HookResult
from pretrain.run.session import Session

FEATURE = "maturity/features"
NAME = "maturity"


@declared(NAME)
class Probes:
    """What the probes have measured so far: the record ``maturity``."""

    probes: list[tuple[NonNegativeInt, float]] = field(default_factory=list)
    """Step and drift of each except the first, which has no predecessor."""


def has_settled(drifts: list[float], config: MaturityConfig) -> bool:
    """Whether the lower half has settled after these drifts, oldest first."""
    if len(drifts) <= config.patience:  # the first drift is its own largest value
        return False
    return all(drift <= config.settled * max(drifts) for drift in drifts[-config.patience :])


class Maturity(Hook):
    """Hook that probes the lower half of the layers, and releases learning-rate rules when it has settled.

    Drifts are kept in the record ``maturity`` of the TrainingState, released rules in
    ``TrainingState.released``. The checkpoint also has the features of the last probe.

    Raises:
        UserError: ``maturity.every`` is neither a fraction nor a whole number of steps; or a rule is to be
            released by maturity, and there is no held-out window to probe with.
    """

    name = NAME

    def __init__(self, session: Session) -> None:
        run, model = session.run, session.model_config
        self.config, self.world = run.maturity, session.world
        self.rules = {name: rule for name, rule in session.rates.rules.items() if rule.latest is not None}
        self.every = max(1, length_in_steps("maturity.every", run.maturity.every, run.steps))
        self.layer = lower_layers(model.num_layers)[-1]
        self._probe: ForwardProbe | None = None
        if self.rules:
            windows = session.validation_windows(run.maturity.sequences)
            self._probe = ForwardProbe(
                model, windows, session.batch.micro_batch, session.world, run.maturity.positions
            )
        self._features: Tensor | None = None

    def state(self) -> dict[str, Tensor]:
        """Features for the checkpoint, which the next drift needs."""
        return {} if self._features is None else {FEATURE: self._features}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of ``state``."""
        self._features = tensors.get(FEATURE)

    def model_changed(self, model: ModelConfig) -> None:
        """Probe a model of other heads; what it gives to the layers above has the same width."""
        if self._probe is not None:
            self._probe.config = model

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Probe if a probe is due, and release the rules that end at the step about to be attempted.
        Collective.

        Returns:
            ``maturity/drift`` at a probe, and a line for each rule that was released.
        """
        waiting = {name: rule for name, rule in self.rules.items() if name not in state.released}
        if not waiting:
            self._features = None  # nothing left to decide
            return HookResult()
        row: dict[str, float] = {}
        record = from_dict(Probes, state.record(NAME), "checkpoint: records in state.json", NAME)
        if state.step % self.every == 0:
            drift = self._measure(engine)
            if drift is not None:
                row["maturity/drift"] = drift
                record.probes.append((state.step, drift))
                state.records[NAME] = Record(to_dict(record))
        drifts = [drift for _, drift in record.probes]
        ready = bool(row) and has_settled(drifts, self.config)
        lines = []
        for name, rule in waiting.items():
            assert rule.latest is not None
            if state.step >= rule.latest:
                state.released[name] = rule.latest
                lines.append(
                    f"release  {name} at step {rule.latest:,}: forced, the lower half has not settled"
                )
            elif ready and state.step >= (rule.hold or 0):
                state.released[name] = state.step
                lines.append(
                    f"release  {name} at step {state.step:,}: the lower half has settled (drift "
                    f"{drifts[-1]:.4f} between probes, {max(drifts):.4f} at most)"
                )
        return HookResult(row, lines)

    def _measure(self, engine: Any) -> float | None:
        """Drift since the last probe; None at the first one."""
        assert self._probe is not None
        result = self._probe.run(engine, [self.layer], attention=False)
        before, self._features = self._features, result.features[self.layer]
        if before is None or before.shape != self._features.shape:
            return None
        # All ranks hold the same features; one of them decides all the same.
        return self.world.broadcast(feature_drift(self._features, before))
