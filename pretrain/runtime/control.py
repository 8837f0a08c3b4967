"""Coordinates requests to stop among all ranks, and sends heartbeats to the watchdog."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pretrain.runtime.signals import StopListener, Stopped
from pretrain.runtime.watchdog import Watchdog
from pretrain.runtime.world import World

VOTE_RANKS = 64
"""Twice as many ranks vote at every second turn, three times as many at every third, and so on. A vote's
messages go around all ranks one after another, which takes 20 to 40 ms for 512."""


class Control:
    """Lets all ranks stop at the same point of the program, and reports progress to the watchdog.

    A vote finds the maximum of a few numbers over all ranks while a step computes: ranks submit at the
    beginning of a step and read the result at its end. It travels over gloo, concurrently with the
    training's collectives, and waits for no device.

    Args:
        listener: receives requests to stop this rank; None (in tests): there are none.
        watchdog: is told of every sign of progress.
    """

    def __init__(
        self, world: World, listener: StopListener | None = None, watchdog: Watchdog | None = None
    ) -> None:
        self.world, self.listener, self.watchdog = world, listener, watchdog
        self._group: Any = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None
        self._interval = max(1, world.size // VOTE_RANKS)
        self._ballot: list[int] | None = None
        self._sent: torch.Tensor | None = None  # on the CPU, even when training runs on a GPU
        self._work: Any = None

    def has_request(self) -> bool:
        """Whether this rank was asked to stop; the others need not know yet."""
        return self.listener is not None and self.listener.reason is not None

    def heartbeat(self, doing: str) -> None:
        """Send the watchdog a heartbeat; *doing* is what comes next."""
        if self.watchdog is not None:
            self.watchdog.heartbeat(doing)

    def end_watch(self) -> None:
        """Tell the watchdog that nothing is left that may hang."""
        if self.watchdog is not None:
            self.watchdog.stop()

    def start_vote(self, turn: int, writing: bool) -> None:
        """Submit whether this rank was asked to stop and whether it still writes a checkpoint; some turns
        have no vote.

        Args:
            turn: counts steps, or passes; the same on all ranks.
        """
        if turn % self._interval:
            return
        code = self.listener.exit_code if self.listener and self.has_request() else 0
        self._ballot = [code, int(writing)]
        if self._group is not None:
            self._sent = torch.tensor(self._ballot, dtype=torch.int64)
            self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def vote_result(self) -> tuple[Stopped | None, bool]:
        """The result of the last start_vote; of a turn without one, None and True. Collective.

        Returns:
            The exception that is to end all ranks if one of them was asked to stop; whether some rank is
            still writing its files of a checkpoint, or may be.
        """
        if self._ballot is None:
            return None, True
        if self._sent is not None:
            self._work.wait()  # for the slowest rank
            self._ballot = self._sent.tolist()
        code, writing = self._ballot
        self._ballot = self._sent = self._work = None
        if not code:
            return None, bool(writing)
        if self.listener is not None:
            self.listener.mark_agreed()
        reason = self.world.first_problem(self.listener.reason if self.listener else None)
        return Stopped(reason or "asked to stop", code), bool(writing)

    @contextlib.contextmanager
    def allow_interruption(self, engine: Any, doing: str) -> Iterator[None]:
        """Vote after forward passes of *engine* in the block, since validation and evaluation can take long.

        All ranks make the same number of passes, so they stop after the same one.

        Raises:
            Stopped: on every rank, when one of them was asked to stop.
        """

        turns = itertools.count()

        def poll(*_: object) -> None:
            self.heartbeat(doing)
            self.start_vote(next(turns), writing=False)
            stop = self.vote_result()[0]
            if stop is not None:
                raise stop

        hook = engine.register_forward_hook(poll)
        try:
            yield
        finally:
            hook.remove()
