"""Receives requests to stop: signals, a wall-clock budget, and the end of the launcher.

SIGUSR1 (a batch system's warning ahead of the end), SIGTERM (preemption), SIGINT (Ctrl-C) and SIGHUP (a
closed terminal) only record a request. The ranks vote at the end of every step and validation batch; once one
of them has a request, all save and end together. A separate thread receives signals, so that one is noticed
even while the main thread compiles or waits in a collective. The other threads block them, and with them the
programs that they start: a compiler must not die of a request that its rank answers by saving. Not SIGTERM,
with which a program may be ended by the one that started it. Nothing heavy is imported here: a program
listens before it does anything else.
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
from typing import Any

from pretrain.runtime.environment import find_ended, find_launchers
from pretrain.runtime.exit import INTERRUPTED

STOPPED = 75
"""Exit code of a run that stopped with everything saved and should be resumed: EX_TEMPFAIL of sysexits.h."""
HEARD = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WAKING = signal.SIGURG
"""Sent to the main thread to interrupt a library's wait; without a handler it would be ignored."""
REPEAT_SECONDS = 2.0
"""The same signal this long after the first ends the process at once. Earlier, it may be the same event:
Ctrl-C reaches a rank from the terminal and from its launcher."""
LOOK_SECONDS = 2.0
"""How often to check whether the launcher still runs, and whether the ranks have taken too long to agree."""


class Stopped(SystemExit):
    """Raised when a run stops on request, after everything that was to be saved is saved.

    It is not an Exception: a library that reports its failures must not catch it. A process that does not
    catch it ends with exit_code.

    Args:
        reason: what asked for it.
        exit_code: STOPPED, or INTERRUPTED (Ctrl-C, after which the run is not requeued).
    """

    saved_step: int | None = None
    """The last step of the session, which is saved; None if training had not begun."""
    resumes = "the same command continues the run"

    def __init__(self, reason: str, exit_code: int = STOPPED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = self.exit_code = exit_code


class StopListener:
    """Receives the signals in HEARD until ``close``; SIGHUP not under nohup, which ignores it.

    Outside the main thread, which alone may receive signals, it knows of the time budget and of the end of
    the launcher only.

    Args:
        agreement_seconds: how long the other ranks may take to agree once this one was asked to stop. A rank
            that is alone by then (a peer died, or hangs) ends without saving.
        budget_seconds: seconds after which the run stops on its own; None means no limit.
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
        self.exit_code = STOPPED
        """INTERRUPTED after Ctrl-C, else STOPPED."""
        self.signalled = False
        """Whether a signal has asked, not the time budget or the launcher's end."""
        self._asked_at = 0.0
        self._lock = threading.RLock()  # a signal may interrupt its holder
        self._first_received: dict[int, float] = {}
        self._agreed = self._saved = False
        self._raise_at_once = False
        self._launchers = find_launchers()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._receives = threading.current_thread() is threading.main_thread()
        self._previous_handlers: dict[int, Any] = {}
        self._heard = [n for n in HEARD if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        if self._receives:
            self._previous_handlers = {n: signal.signal(n, self._in_main_thread) for n in self._heard}
            self._previous_handlers[WAKING] = signal.signal(WAKING, lambda *_: None)
            # Written to by the C handler, even while the main thread is inside a library and runs no Python.
            self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._block()
        _LISTENERS.add(self)

    @property
    def reason(self) -> str | None:
        """What asked this rank to stop, or None."""
        budget = self.budget_seconds
        if self._reason is None and budget is not None and time.monotonic() >= self._began + budget:
            self._ask(f"time budget of {budget / 60:g} minutes used up", STOPPED)
        return self._reason

    def limit(self, agreement_seconds: float, minutes: float | None) -> None:
        """Set agreement_seconds and the time budget, which counts from the listener's beginning."""
        self.agreement_seconds = agreement_seconds
        self.budget_seconds = None if minutes is None else 60 * minutes

    def mark_saved(self) -> contextlib.AbstractContextManager[None]:
        """Record that nothing is left to save: from now on a request to stop ends the process with 0. The
        block is one of raising."""
        self._agreed = self._saved = True
        return self.raising()

    def mark_agreed(self) -> None:
        """Record that the ranks have agreed to stop: from now on saving has no time limit."""
        self._agreed = True

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """In the block, a signal raises Stopped in the main thread; for code before training, with nothing to
        save."""
        self._raise_at_once = True
        try:
            self.check()
            yield
        finally:
            self._raise_at_once = False
            self._block()  # starting a process, Python's multiprocessing unblocks two of them

    def check(self) -> None:
        """Raise Stopped if this rank was asked to stop."""
        if self.reason is not None:
            raise Stopped(self.reason, 0 if self._saved else self.exit_code)

    def let_the_launcher_end(self) -> None:
        """Wait until Ctrl-C has ended a launcher: what this process prints next comes after its traceback."""
        deadline = time.monotonic() + REPEAT_SECONDS
        while self._launchers and find_ended(self._launchers) is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        """Restore the previous signal handlers, and end the thread."""
        self._give_back()
        self._agreed = True
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")  # no signal has this number: the thread ends
        self._thread.join(timeout=5)
        self._receiver.close()
        self._sender.close()

    def _give_back(self) -> None:
        _LISTENERS.discard(self)
        if self._receives:
            signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)

    def _block(self) -> None:
        """Block them in the calling thread, the threads and the processes that it will start."""
        if self._receives:
            signal.pthread_sigmask(signal.SIG_BLOCK, {*self._heard} - {signal.SIGTERM})

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        # The thread counts repeated signals: this may run long after the signal, when a library returns.
        self._ask_for(number)
        if self._raise_at_once:
            self._raise_at_once = False
            self.check()

    def _listen(self) -> None:
        if self._receives:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._heard)
        self._receiver.settimeout(LOOK_SECONDS)
        while True:
            data = b""
            with contextlib.suppress(TimeoutError):
                data = self._receiver.recv(64)
            heard = [number for number in data if number in self._heard]
            for number in heard:
                self._note(number)
            if b"\0" in data:
                return
            if (heard or not data) and self._reason is not None and self._raise_at_once and self._receives:
                # This thread has received the signal: the handler runs when the main thread's wait is
                # interrupted. Again and again, since that may only be about to wait.
                signal.pthread_kill(threading.main_thread().ident or 0, WAKING)
            if self._reason is None:
                self._check_the_launcher()
            elif not self._agreed and time.monotonic() > self._asked_at + self.agreement_seconds:
                alone = os.environ.get("WORLD_SIZE", "1") == "1"
                late = "its current operation has not ended" if alone else "the other ranks have not agreed"
                self._say(f"asked to stop {self.agreement_seconds:g} s ago and {late}; ending without saving")
                self._end(STOPPED)
                return

    def _check_the_launcher(self) -> None:
        process = find_ended(self._launchers)
        if process is not None:
            self._ask(f"its launcher, process {process}, has gone", STOPPED)
            if self._raise_at_once and self._receives:  # its handler raises; it adds nothing to the reason
                os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if now - self._first_received.setdefault(number, now) >= REPEAT_SECONDS:
            how = "everything is saved" if self._saved else "without saving"
            self._say(f"{signal.Signals(number).name} again; ending at once, {how}")
            self._end(0 if self._saved else 128 + number)
        else:
            self._ask_for(number)

    def _ask_for(self, number: int) -> None:
        self.signalled = True
        self._ask(signal.Signals(number).name, INTERRUPTED if number == signal.SIGINT else STOPPED)

    def _ask(self, reason: str, exit_code: int) -> None:
        # The thread and the main thread receive the same signals. The first one counts, except for Ctrl-C:
        # the SIGTERM that a launcher sends after it arrives first when both were pending for this process.
        with self._lock:
            if self._reason is None or exit_code == INTERRUPTED:
                # In this order: a thread that sees the reason reads the others.
                self._asked_at = self._asked_at or time.monotonic()
                self.exit_code = exit_code
                self._reason = reason

    @staticmethod
    def _say(text: str) -> None:
        # Not print(): its lock may be held by the main thread that is stuck.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"rank {os.environ.get('RANK', '0')}: {text}\n".encode())


_LISTENERS: set[StopListener] = set()


def _give_back_in_a_fork() -> None:
    """A forked child, such as a worker of a library's pool, does not answer for its parent: it must end when
    that asks it to."""
    for listener in tuple(_LISTENERS):
        listener._give_back()


os.register_at_fork(after_in_child=_give_back_in_a_fork)
