"""The learning rate as a function of the trainer's step: a base schedule, and the factor of a rule on top of
it.

The trainer asks for the rate of the step it is about to attempt and writes it into the optimizer's groups
itself. DeepSpeed's own scheduler call is not used: it stands still at a skipped update while the step counter
moves on.
"""

from __future__ import annotations

import math

from model.errors import UserError
from pretrain.config.lr_rules import LearningRateRule
from pretrain.config.sections import ScheduleConfig, describe_phase, length_in_steps, phase_in_steps


class LearningRateSchedule:
    """Factor of the peak learning rate at each step: at most 1, after the warmup at least *minimum*.

    Warmup rises linearly and reaches 1 at step ``warmup - 1``; the last step of the run is at ``minimum``.

    Args:
        config: kind and lengths.
        steps: optimizer steps in the run.

    Raises:
        UserError: warmup and decay do not fit into the run.
    """

    def __init__(self, config: ScheduleConfig, steps: int) -> None:
        self.config = config
        self.steps = steps
        self.warmup = length_in_steps("schedule.warmup", config.warmup, steps)
        self.decay = phase_in_steps("schedule.decay", config.decay, steps) if config.kind == "wsd" else 0
        if config.kind == "wsd" and config.decay and self.warmup < steps:
            self.decay = max(1, self.decay)  # a share of few steps also ends at the minimum
        if config.kind == "linear":  # the decay begins with the end of the warmup
            self.decay = max(0, steps - self.warmup)
        if self.warmup > steps:
            raise UserError(f"schedule.warmup: {self.warmup} steps is longer than the run of {steps} steps")
        if self.warmup + self.decay > steps:
            raise UserError(
                f"schedule.decay: {self.decay} steps after a warmup of {self.warmup} is longer than the "
                f"run of {steps} steps; give at most {describe_phase(steps - self.warmup, steps)}"
            )

    def factor(self, step: int) -> float:
        """Factor at the 0-based *step* about to be attempted.

        Cosine: ``m + (1 - m) * (1 + cos(pi * p)) / 2`` with ``p`` running from 0 at the end of the warmup to
        1 at the last step (Loshchilov & Hutter 2017). WSD: 1, then linear to ``m`` over the last ``decay``
        steps. Linear: the same without the steps at 1.
        """
        minimum = self.config.minimum
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.config.kind == "cosine":
            progress = (step + 1 - self.warmup) / max(1, self.steps - self.warmup)
            return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        into_decay = step + 1 - (self.steps - self.decay)
        if into_decay <= 0:
            return 1.0
        return 1 - (1 - minimum) * min(1.0, into_decay / self.decay)


class RuleSchedule:
    """The factor by which a rule multiplies the base learning rate, as a pure function of the step.

    ``scale`` up to the release; then ``ramp`` steps, the i-th of them (from 1) at scale + (1 - scale) i /
    ramp; then 1. A rule with a hold releases after it. One with ``release: maturity`` releases at the step
    that is decided, no earlier than its hold and no later than its ``latest``.

    Args:
        rule: what to multiply, and for how long.
        steps: optimizer steps in the run.

    Raises:
        UserError: hold (or latest) and ramp do not fit into the run, or leave no step with another rate.
    """

    def __init__(self, rule: LearningRateRule, steps: int) -> None:
        self.rule = rule
        where = f"lr_rules.{rule.name}"
        self.ramp = length_in_steps(f"{where}.ramp", rule.ramp, steps)
        self.hold: int | None = None
        if rule.hold is not None:
            self.hold = phase_in_steps(f"{where}.hold", rule.hold, steps)
        self.latest: int | None = None
        if rule.latest is not None:
            self.latest = phase_in_steps(f"{where}.latest", rule.latest, steps)
            if (self.hold or 0) > self.latest:
                raise UserError(
                    f"{where}.hold: {self.hold} steps are more than latest, {self.latest}; give at most that"
                )
        name, end = ("latest", self.latest) if self.latest is not None else ("hold", self.hold)
        if end is None:
            return
        if end + self.ramp > steps:
            raise UserError(
                f"{where}.{name}: {end} steps and a ramp of {self.ramp} go beyond the run of {steps} steps; "
                + (
                    f"give at most {describe_phase(steps - self.ramp, steps)}"
                    if self.ramp < steps
                    else "give a shorter ramp"
                )
            )
        if end + self.ramp == 0 and (rule.scale != 1 or rule.depth_decay != 1):
            raise UserError(
                f"{where}.{name}: {getattr(rule, name)} of a run of {steps} steps is less than one step, so "
                "the rule changes nothing; give a number of steps"
            )

    def release_step(self, released: int | None = None) -> int | None:
        """The first step after the slow-down; None while a rule by maturity is undecided, or if it never
        ends.

        Args:
            released: the step at which the lower half was found settled, for ``release: maturity``.
        """
        if self.latest is None:
            return self.hold
        return None if released is None else min(max(released, self.hold or 0), self.latest)

    def factor(self, step: int, depth: int = 0, released: int | None = None) -> float:
        """The factor at the 0-based *step* for parameters *depth* layers above the rule's lowest."""
        scale = self.rule.scale * self.rule.depth_decay**depth
        release = self.release_step(released)
        if release is None and self.latest is not None and step >= self.latest:
            release = self.latest
        if release is None or step < release:
            return scale
        into_ramp = step - release + 1
        return 1.0 if into_ramp >= self.ramp else scale + (1 - scale) * into_ramp / self.ramp
