"""What a rank's own work takes, to tell a slow rank from those that wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pretrain.runtime.world import World


class ForwardClock:
    """The time of this rank's forward passes, by its device's clock.

    The ranks wait for each other in every step, so that all of them take as long as the slowest. A forward
    pass of a whole model (t = 1, ZeRO stage 1 or 2) waits for nobody.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds, self._passes = 0.0, 0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the block as a pass. On a GPU nothing is waited for."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
        else:
            began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began_at.record()
            yield
            ended_at.record()
            self._events.append((began_at, ended_at))
        self._passes += 1

    def read(self) -> float:
        """Mean seconds of a pass since the last reading; NaN without one. Waits for the GPU's last pass."""
        for began_at, ended_at in self._events:
            ended_at.synchronize()
            self._seconds += began_at.elapsed_time(ended_at) / 1000
        passes, seconds = self._passes, self._seconds
        self._seconds, self._passes, self._events = 0.0, 0, []
        return seconds / passes if passes else float("nan")


def rank_figures(clock: ForwardClock, world: World, rates: dict[str, float]) -> dict[str, float]:
    """The figures ``ranks/…`` of the steps since the last call; none of a run of one rank. Collective.

    Args:
        rates: of all ranks, with tokens_per_second if it is known.
    """
    if world.size == 1:
        return {}
    seconds = world.gather(clock.read())
    slowest = max(range(world.size), key=seconds.__getitem__)
    figures = {
        "ranks/forward_seconds": sum(seconds) / world.size,
        "ranks/forward_seconds_slowest": seconds[slowest],
        "ranks/slowest": slowest,
    }
    if "tokens_per_second" in rates:
        figures["ranks/tokens_per_second"] = rates["tokens_per_second"] / world.size
    return figures
