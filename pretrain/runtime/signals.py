"""Being asked to stop: signals, a wall-clock budget and a launcher that has gone, agreed on by all ranks.

SIGUSR1 (a batch system's warning ahead of the end), SIGTERM (preemption) and SIGINT (Ctrl-C) only leave a note. The
ranks vote at the end of every step and batch of a validation; once one of them has a note, all save and end together.
A thread of its own hears signals, so that one is also noticed while the main thread compiles or waits in a collective.
Nothing heavy is imported here: a program listens before it does anything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from model.errors import INTERRUPTED
from pretrain.runtime.launchers import gone, launchers

STOPPED = 75
"""Exit code of a run that stopped with everything saved and wants to go on: EX_TEMPFAIL of sysexits.h."""
HEARD = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 2.0
"""The same signal again, so long after the first, ends the process at once. Sooner it may be the same event: Ctrl-C
reaches a rank from the terminal and from its launcher."""
LOOK_SECONDS = 2.0
"""How often to look whether the launcher is still there."""


class Stopped(BaseException):
    """The run was asked to stop, and did; what was to be saved is saved.

    Like KeyboardInterrupt no Exception: a library that reports its own failures must not take it for one.

    Args:
        reason: what asked for it.
        exit_code: STOPPED, or INTERRUPTED (Ctrl-C, after which nobody wants to be requeued).
    """

    def __init__(self, reason: str, exit_code: int = STOPPED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


class StopListener:
    """Hears the signals of HEARD until ``close``. Only the main thread of a process may make one.

    Args:
        agreement_seconds: how long the other ranks may take to agree once this one was asked to stop. A rank that is
            alone by then (a peer died, or hangs) ends without saving.
        budget_seconds: seconds after which the run stops by itself; None leaves it running.
        end: ends the process; replaced in tests.
    """

    def __init__(
        self,
        agreement_seconds: float = 300.0,
        budget_seconds: float | None = None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._began = time.monotonic()
        self.agreement_seconds = agreement_seconds
        self.budget_seconds = budget_seconds
        self._end = end
        self._reason: str | None = None
        self._exit_code = STOPPED
        self._asked = 0.0
        self._lock = threading.RLock()  # a signal may interrupt its holder
        self._heard: dict[int, float] = {}
        self._agreed = threading.Event()
        self._raising = False
        self._launchers = launchers()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._previous = {number: signal.signal(number, self._in_main_thread) for number in HEARD}
        # Written to by the C handler, even while the main thread is inside a library and runs no Python.
        self._wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    @property
    def reason(self) -> str | None:
        """What asked this rank to stop, or None."""
        budget = self.budget_seconds
        if self._reason is None and budget is not None and time.monotonic() >= self._began + budget:
            self._ask(f"time budget of {budget / 60:g} minutes used up", STOPPED)
            with contextlib.suppress(OSError):
                self._theirs.send(b"\1")  # not one of HEARD: the thread only starts its clock
        return self._reason

    @property
    def exit_code(self) -> int:
        """INTERRUPTED after Ctrl-C, else STOPPED."""
        return self._exit_code

    def limit(self, agreement_seconds: float, minutes: float | None) -> None:
        """Set agreement_seconds and the time budget, which counts from the listener's beginning."""
        self.agreement_seconds = agreement_seconds
        self.budget_seconds = None if minutes is None else 60 * minutes

    def agreed(self) -> None:
        """The ranks have agreed to stop: from now on saving may take its time."""
        self._agreed.set()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Stopped in the main thread: while nothing has begun, there is nothing to save."""
        self._raising = True
        try:
            self.check()
            yield
        finally:
            self._raising = False

    def check(self) -> None:
        """Raise Stopped if this rank was asked to stop."""
        if self.reason is not None:
            raise Stopped(self.reason, self.exit_code)

    def close(self) -> None:
        """Give the signals back to whoever had them before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._agreed.set()
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")  # no signal has this number: the thread ends
        self._thread.join(timeout=5)
        self._ours.close()
        self._theirs.close()

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        # Repeats are the thread's to count: this may run long after the signal, when a library returns.
        self._ask_for(number)
        if self._raising:
            self._raising = False
            self.check()

    def _listen(self) -> None:
        while True:
            waiting = None
            if self._reason is not None and not self._agreed.is_set():
                waiting = max(0.0, self._asked + self.agreement_seconds - time.monotonic())
            looking = LOOK_SECONDS if self._launchers and self._reason is None else None
            self._ours.settimeout(looking if waiting is None else waiting)
            try:
                data = self._ours.recv(64)
            except TimeoutError:
                if waiting is None:
                    self._look_for_the_launcher()
                    continue
                if self._agreed.is_set():
                    continue
                self._say(
                    f"asked to stop {self.agreement_seconds:g} s ago and the other ranks have not agreed; "
                    "ending without saving"
                )
                self._end(STOPPED)
                return
            except OSError:
                return
            for number in data:
                if number in HEARD:
                    self._note(number)
            if b"\0" in data or not data:
                return

    def _look_for_the_launcher(self) -> None:
        process = gone(self._launchers)
        if process is not None and self._reason is None:
            self._ask(f"its launcher, process {process}, has gone", STOPPED)
            if self._raising:  # only a signal reaches the main thread; it adds nothing to the reason
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if now - self._heard.setdefault(number, now) >= REPEAT_SECONDS:
            self._say(f"{signal.Signals(number).name} again; ending at once, without saving")
            self._end(128 + number)
        else:
            self._ask_for(number)

    def _ask_for(self, number: int) -> None:
        self._ask(signal.Signals(number).name, INTERRUPTED if number == signal.SIGINT else STOPPED)

    def _ask(self, reason: str, exit_code: int) -> None:
        # The thread and the main thread hear the same signals. The first one counts, but for Ctrl-C: the SIGTERM that a
        # launcher sends after it is heard first when both were waiting for this process.
        with self._lock:
            if self._reason is None or exit_code == INTERRUPTED:
                # In this order: whoever sees the reason reads the others.
                self._asked = self._asked or time.monotonic()
                self._exit_code = exit_code
                self._reason = reason

    @staticmethod
    def _say(text: str) -> None:
        # Not print(): its lock may be held by the main thread that is stuck.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"rank {os.environ.get('RANK', '0')}: {text}\n".encode())
