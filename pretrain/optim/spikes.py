"""Skips updates whose loss or gradient norm is far above its recent values, before they are applied.

The rule of OLMo's SkipStepOptimizer: with the last WINDOW values of the cross-entropy (the reported
train_loss) and of the global gradient norm, an update is skipped when one of the two lies more than a number
of standard deviations above its mean.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor

WINDOW = 128
"""Steps that mean and standard deviation are taken over."""
LEAST = WINDOW // 2
"""With fewer values nothing is a spike: the first steps of a run have no level yet."""


class SpikeGuard:
    """Decides at every step whether its update is skipped.

    A skipped step's values enter the window too: a level that has really changed is accepted after a few
    steps.

    Args:
        sigmas: standard deviations above the mean from which a value is a spike; 0 never skips.
        losses, norms: the last values of an earlier session.
    """

    def __init__(
        self, sigmas: float, losses: list[float] | None = None, norms: list[float] | None = None
    ) -> None:
        self.sigmas = sigmas
        self.losses: deque[float] = deque(filter(math.isfinite, losses or []), WINDOW)
        self.norms: deque[float] = deque(filter(math.isfinite, norms or []), WINDOW)
        self.norm: float | None = None
        """Global gradient norm of the step that was skipped last; DeepSpeed itself reports infinity."""
        self.reason: str | None = None
        """Why the newest step was skipped as a spike, or None."""
        self._loss: Tensor | None = None

    def recent(self) -> dict[Literal["losses", "norms"], list[float]]:
        """The arguments of a SpikeGuard that continues from this one's values."""
        return {"losses": list(self.losses), "norms": list(self.norms)} if self.sigmas else {}

    def expect(self, loss: Tensor) -> None:
        """Note the step's *loss* before its update: the same on all ranks, still on the device."""
        self._loss, self.reason = loss, None

    def spike(self, norm: Any) -> bool:
        """Whether the update with this global gradient norm (before clipping) is to be skipped."""
        values = (float(self._loss) if self._loss is not None else math.nan, float(norm))
        self._loss = None
        if not all(math.isfinite(value) for value in values):
            return False  # skipped anyway, and no value to compare others with
        for name, value, window in zip(
            ("loss", "gradient norm"), values, (self.losses, self.norms), strict=True
        ):
            if self.reason is None and len(window) >= LEAST:
                mean, deviation = statistics.fmean(window), statistics.stdev(window)
                if value > mean + self.sigmas * deviation:
                    self.reason = (
                        f"{name} {value:.4g} is more than {self.sigmas:g} standard deviations above the last "
                        f"{len(window)} steps' {mean:.4g} ± {deviation:.2g}"
                    )
                    self.norm = values[1]
            window.append(value)
        return self.reason is not None


def global_loss(loss: Tensor, world: Any) -> Tensor:
    """Mean of the data-parallel ranks' losses, fp64, on the device. Collective."""
    total: Tensor = world.sum(loss.detach().to(torch.float64).clone())
    return total / world.data_parallel
