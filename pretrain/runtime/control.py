"""Coordinates requests to stop among all ranks, and sends heartbeats to the watchdog."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pretrain.runtime.signals import StopListener, Stopped
from pretrain.runtime.watchdog import Watchdog
from pretrain.runtime.world import COLLECTIVE_TIMEOUT, World

VOTE_RANKS = 64
"""Twice as many ranks vote at every second turn, three times as many at every third, and so on. A vote's messages go
around all ranks one after another, which takes 20 to 40 ms for 512."""


class Abandoned(Exception):
    """Raised when the ranks agreed to stop during work that changes nothing and can be repeated.

    Args:
        code: exit code with which to stop.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Answer(NamedTuple):
    """Result of a vote."""

    stop: int
    """Exit code with which all ranks are to stop, 0 to go on."""
    writing: bool
    """Whether some rank is still writing its files of a checkpoint, or may be."""


class Vote:
    """Finds the maximum of a few numbers over all ranks, while a step computes.

    Ranks submit at the beginning of a step and read the result at its end, all at the same point of the program. It
    travels over gloo beside the training's own collectives and waits for no device.

    Args:
        ranks: number of ranks; with 1 there is no communication.
        timeout: longest wait for a rank that does not vote.
    """

    def __init__(self, ranks: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if ranks > 1 else None
        self._submitted: list[int] | None = None
        self._ballot: torch.Tensor | None = None  # on the CPU, even when training runs on a GPU
        self._work: Any = None

    def submit(self, *values: int) -> None:
        """Submit this rank's values; every rank must submit the same number of them."""
        self._submitted = [int(value) for value in values]
        if self._group is not None:
            self._ballot = torch.tensor(self._submitted, dtype=torch.int64)
            self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def result(self) -> list[int]:
        """The largest of each submitted value over all ranks. Waits for the slowest rank."""
        assert self._submitted is not None, "submit() first"
        largest, self._submitted = self._submitted, None
        if self._ballot is not None:
            self._work.wait()
            largest, self._ballot, self._work = self._ballot.tolist(), None, None
        return largest


class Control:
    """Coordinates stop requests across ranks, and reports progress to the watchdog.

    Args:
        listener: receives requests to stop this rank; None (in tests): there are none.
        watchdog: is told of every sign of progress.
    """

    def __init__(
        self, world: World, listener: StopListener | None = None, watchdog: Watchdog | None = None
    ) -> None:
        self.world, self.listener, self.watchdog = world, listener, watchdog
        self._vote = Vote(world.size, world.timeout)
        self._interval = max(1, world.size // VOTE_RANKS)
        self._voting = False

    def heartbeat(self, doing: str) -> None:
        """Send the watchdog a heartbeat; *doing* is what comes next."""
        if self.watchdog is not None:
            self.watchdog.heartbeat(doing)

    def start_vote(self, turn: int, writing: bool) -> None:
        """Submit whether this rank was asked to stop and whether it still writes a checkpoint; some turns have no vote.

        Args:
            turn: counts steps, or passes; the same on all ranks.
        """
        self._voting = turn % self._interval == 0
        if self._voting:
            asked = self.listener is not None and self.listener.reason is not None
            self._vote.submit(self.listener.exit_code if self.listener and asked else 0, writing)

    def vote_result(self) -> Answer:
        """What all ranks together answered to the last start_vote; to go on, and not to be sure, at a turn without one.

        Collective.
        """
        if not self._voting:
            return Answer(0, True)
        stop, writing = self._vote.result()
        if stop and self.listener is not None:
            self.listener.agreed()
        return Answer(stop, bool(writing))

    @contextlib.contextmanager
    def interruptible(self, engine: Any, doing: str) -> Iterator[None]:
        """Vote after forward passes of *engine* in the block, since validation and evaluation can take long.

        All ranks make the same number of passes, so they stop after the same one.

        Raises:
            Abandoned: on every rank, when one of them was asked to stop.
        """

        turns = itertools.count()

        def poll(*_: object) -> None:
            self.heartbeat(doing)
            self.start_vote(next(turns), writing=False)
            if code := self.vote_result().stop:
                raise Abandoned(code)

        hook = engine.register_forward_hook(poll)
        try:
            yield
        finally:
            hook.remove()

    def stopped(self, code: int) -> Stopped:
        """The exception that ends all ranks with *code*. Collective."""
        reason = self.world.agree(self.listener.reason if self.listener else None)
        return Stopped(reason or "asked to stop", code)
