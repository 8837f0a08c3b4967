"""The learning rate as a function of the trainer's step: a base schedule, the same for every parameter group.

The trainer asks for the rate of the step it is about to attempt and writes it into the optimizer's groups itself.
DeepSpeed's own scheduler call is not used: it stands still at a skipped update while the step counter moves on.
"""

from __future__ import annotations

import math

from model.errors import UserError
from pretrain.config import ScheduleConfig


def length_in_steps(name: str, value: float, steps: int) -> int:
    """Turn a length given as a fraction of the run (below 1) or in steps into steps.

    Raises:
        UserError: a length in steps that is no whole number.
    """
    if value < 1:
        return round(value * steps)
    if value != int(value):
        raise UserError(f"{name}: {value} is neither a fraction below 1 nor a whole number of steps")
    return int(value)


class LearningRateSchedule:
    """Factor of the peak learning rate at each step, in [minimum, 1].

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
        self.decay = length_in_steps("schedule.decay", config.decay, steps) if config.kind == "wsd" else 0
        if self.warmup > steps:
            raise UserError(f"schedule.warmup: {self.warmup} steps is longer than the run of {steps} steps")
        if self.warmup + self.decay > steps:
            raise UserError(
                f"schedule.decay: {self.decay} steps after a warmup of {self.warmup} is longer than the "
                f"run of {steps} steps; give at most {steps - self.warmup}"
            )

    def factor(self, step: int) -> float:
        """Factor at the 0-based *step* about to be attempted.

        Cosine: ``m + (1 - m) * (1 + cos(pi * p)) / 2`` with ``p`` running from 0 at the end of the warmup to 1 at
        the last step (Loshchilov & Hutter 2017). WSD: 1, then linear to ``m`` over the last ``decay`` steps.
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
