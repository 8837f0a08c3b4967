"""Ends ranks that hang: without a heartbeat for too long, every rank writes its stacks and ends."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.config.run_config import RunConfig
from pretrain.runtime.world import World

HUNG = 76
"""Exit code of a rank that its watchdog ended."""
# After the first rank has written its stacks, the others get this long to write theirs, before a batch system
# that sees one rank fail kills the rest.
GRACE_SECONDS = 10.0
# The interpreter's own watchdog, which needs no Python, ends a process in which no Python thread gets to run.
LAST_RESORT_SECONDS = 60.0
COLLECTIVES = "nccl_rank_"
"""What NCCL's flight recorder held, in files of this name and the rank: those that torchfrtrace expects."""


class Watchdog:
    """Ends this process when ``heartbeat`` was not called for a while.

    A rank that hangs stops all others in the next collective. So all watchdogs fire, and the stacks show
    which rank was elsewhere.

    Use it as a context manager. An error that leaves it after so long without a heartbeat, such as the lost
    connection to a rank that its own watchdog has ended, follows from the hang: then the process also ends as
    hung.

    Args:
        seconds: longest time between two heartbeats; 0 turns it off.
        folder: where ``stacks_rank_00003.txt`` is written.
        rank: this process's rank.
        end: ends the process; replaced in tests.
        grace: seconds between writing and ending.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        rank: int,
        end: Callable[[int], None] = os._exit,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.seconds = seconds
        self.path = folder / f"stacks_rank_{rank:05d}.txt"
        self.rank = rank
        self._end = end
        self._grace = grace
        self._doing = "starting"
        self._last_heartbeat = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def heartbeat(self, doing: str) -> None:
        """Report progress; *doing* is what comes next, for the message."""
        self._doing, self._last_heartbeat = doing, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self.seconds > 0:
            self.heartbeat(self._doing)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._thread is not None and isinstance(error, Exception) and self._seconds_left() <= 0:
            self._thread.join()
        self.stop()

    def stop(self) -> None:
        """Watch no longer. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            # This thread runs, so the interpreter does; its own watchdog starts again.
            # To the descriptor: in some notebooks sys.stderr has none.
            faulthandler.dump_traceback_later(self.seconds + LAST_RESORT_SECONDS, exit=True, file=2)
            seconds_left = self._seconds_left()
            if seconds_left <= 0:
                self._write_stacks_and_end()
                return
            if self._stop.wait(min(seconds_left, LAST_RESORT_SECONDS / 2)):
                return

    def _seconds_left(self) -> float:
        return self._last_heartbeat + self.seconds - time.monotonic()

    def _write_stacks_and_end(self) -> None:
        doing = self._doing
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as file:
                file.write(f"rank {self.rank} after {self.seconds:g} s without progress, while {doing}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        recorded = self._write_collectives()
        text = (
            f"error: watchdog: rank {self.rank} made no progress for {self.seconds:g} s while {doing}; the "
            "stacks of "
            f"every rank are in {self.path.parent}{recorded}; the run continues from its newest checkpoint\n"
        )
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), text.encode())  # not print(): its lock may be held
        if not self._stop.wait(self._grace):
            self._end(HUNG)

    def _write_collectives(self) -> str:
        """Write what NCCL's flight recorder holds next to the stacks; returns a hint for the message."""
        if not os.environ.get("TORCH_FR_BUFFER_SIZE", "0").strip("0"):
            return ""
        try:
            recorded = importlib.import_module("torch._C._distributed_c10d")._dump_nccl_trace()
            (self.path.parent / f"{COLLECTIVES}{self.rank}").write_bytes(recorded)
        except Exception:  # no NCCL in this build of torch, or nothing recorded: the stacks are there
            return ""
        return f", and their collectives (torchfrtrace {self.path.parent} --prefix {COLLECTIVES})"


def start_watchdog(run: RunConfig, world: World) -> Watchdog:
    """The watchdog of a session, with a separate folder: the stacks of an earlier one stay. Collective."""
    began = world.broadcast(time.strftime("%Y-%m-%d_%H-%M-%S"))
    return Watchdog(60 * run.interruption.hang_minutes, run.folder / "stacks" / began, world.rank)
