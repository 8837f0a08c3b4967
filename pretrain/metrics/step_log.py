"""Collects rows of metrics whose values are still on the device.

Reading a loss waits for the device. A step therefore only notes its tensors; one read serves all steps since
the last, and metrics.jsonl still gets a row for every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.metrics.metrics import ForwardClock, Metrics, rank_values
from pretrain.runtime.world import World

LOSSES = ("train_loss", "z_loss")
"""The terms of the training loss: the mean cross-entropy and, in runs with a z loss, what that adds."""


class StepLog:
    """Collects the rows of the steps since the last flush.

    Args:
        metrics: where finished rows go.
        tokens_per_step: label tokens of all ranks in one step.
        seconds_before: training seconds of earlier sessions of the run.
        step: the step that this session begins after.
    """

    def __init__(
        self, metrics: Metrics, world: World, tokens_per_step: int, seconds_before: float, step: int = 0
    ) -> None:
        self.metrics = metrics
        self.world = world
        self.tokens_per_step = tokens_per_step
        self.seconds_before = seconds_before
        self.forward = ForwardClock(world.device)
        self._step = step
        self._rows: list[tuple[int, dict[str, Any]]] = []
        """Rows that are not written yet; those at the end still lack loss and norm, which are on the
        device."""
        self._losses: list[Tensor] = []
        self._norms: list[Any] = []

    @property
    def seconds(self) -> float:
        """Training seconds of the run so far, over all its sessions, without validation and saving."""
        return self.seconds_before + self.metrics.throughput.seconds

    def add(self, step: int, losses: Tensor, grad_norm: Any, row: dict[str, Any]) -> None:
        """Note a step: *losses* are this rank's means of the first LOSSES, [1] or [2], still on the device;
        *grad_norm* may be there too."""
        self._step = step
        self._rows.append((step, row))
        self._losses.append(losses)
        self._norms.append(grad_norm)

    def read(self) -> dict[str, Any] | None:
        """Read all noted values from the device at once, and count their steps as done. Collective.

        LOSSES are means over the data-parallel ranks, ``grad_norm`` is the global norm before clipping.

        Returns:
            A copy of the newest step's row; None if no step was noted since the last flush.
        """
        if not self._losses:
            return dict(self._rows[-1][1]) if self._rows else None
        losses = self.world.sum(torch.stack(self._losses).double()) / self.world.data_parallel  # [steps, k]
        norms = [torch.as_tensor(norm, dtype=torch.float64, device=losses.device) for norm in self._norms]
        read = torch.cat([losses, torch.stack(norms)[:, None]], 1).tolist()  # waits for the device
        self.metrics.throughput.add(self.tokens_per_step * len(read))
        names = (*LOSSES[: losses.shape[1]], "grad_norm")
        for (_, row), values in zip(self._rows[-len(read) :], read, strict=True):
            row |= dict(zip(names, values, strict=True))
        self._losses, self._norms = [], []
        return dict(self._rows[-1][1])

    def flush(self, extra: dict[str, Any] | None = None) -> None:
        """Write the rows noted so far, the newest with the throughput and with *extra*. Collective."""
        self.read()
        if not self._rows:
            if extra:
                self.metrics.log(self._step, extra)
            return
        rates = self.metrics.throughput.rates()
        ranks = rank_values(self.forward, self.world, rates)
        last = {"seconds": round(self.seconds, 3), **rates, **ranks, **(extra or {})}
        self._rows[-1][1].update(last)
        for step, row in self._rows:
            self.metrics.log(step, row, show=row is self._rows[-1][1])
        self._rows = []
