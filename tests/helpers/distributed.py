"""Run an ordinary test function on several processes that are started once and reused.

    def all_ranks_agree(value):
        total = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(total)
        return total.item()

    def test_all_ranks_agree():
        assert run_distributed(all_ranks_agree, 2, 10) == [21, 21]

``run_distributed`` sends a module-level function and its arguments to a pool of workers, one pool for each
world size, which has its process group (gloo, one thread a rank) ready; it returns the ranks' results in rank
order. A rank that raises, dies or hangs ends the call with a ``DistributedError`` that names the rank and
shows its traceback and last output; that pool is then thrown away, since nobody knows which collectives are
still pending, and the next call starts a new one. What a worker does is in distributed_worker.py.

Workers are forks (nursery.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from tests.helpers.distributed_worker import serve
from tests.helpers.launch import rank_environment
from tests.helpers.nursery import start_nursery

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 120.0
# After one rank failed, the others get this long to report too; most of them wait for it in a collective.
GRACE = 1.0
OUTPUT_LINES = 40


class DistributedError(AssertionError):
    """A rank raised, died or hung; the text names it and shows its traceback and last output."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on *world_size* ranks at once; return their results in rank order.

    *function* must be defined at the top level of a module, *args*, *kwargs* and results must pickle.
    *timeout* is in seconds and covers the call, not the start of the workers and their imports.
    """
    __tracebackhide__ = True
    if "." in function.__qualname__ or "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} must be defined at the top level of its module")
    path = Path(sys.modules[function.__module__].__file__ or "").resolve()
    arguments = pickle.dumps((args, kwargs))
    pool = _pools.get(world_size)
    if pool is None or not pool.alive():
        shutdown(world_size)
        pool = _pools[world_size] = Pool(world_size)
    failure: str | None = "interrupted"
    try:
        failure = pool.load(function.__module__, path)
        if failure is None:
            call = (function.__module__, str(path), function.__qualname__, arguments)
            results, failure = pool.call(call, timeout)
    finally:
        if failure is not None:
            shutdown(world_size)
    if failure is not None:
        raise DistributedError(failure) from None
    return results


def shutdown(world_size: int | None = None) -> None:
    """End the workers of one world size, or all of them; the next call starts new ones."""
    for size in list(_pools) if world_size is None else [world_size]:
        pool = _pools.pop(size, None)
        if pool is not None:
            pool.close()


class Pool:
    """The workers of one world size."""

    def __init__(self, world_size: int) -> None:
        self.loaded: set[str] = set()
        # The store lives in this process, which picks the port by binding it: two pools that start together
        # cannot choose the same one.
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.ranks = [Rank(rank, world_size, self.store.port) for rank in range(world_size)]
        try:
            failure = self._collect(START_TIMEOUT)[1]
        except BaseException:
            self.close()
            raise
        if failure is not None:
            self.close()
            raise DistributedError(f"the workers did not start: {failure}")

    def alive(self) -> bool:
        return all(rank.process.is_alive() for rank in self.ranks)

    def load(self, module: str, path: Path) -> str | None:
        """Import the test module on all ranks, once; return a text that says what failed."""
        if module in self.loaded:
            return None
        self.loaded.add(module)
        return self.call((module, str(path), None, b""), START_TIMEOUT)[1]

    def call(self, call: tuple[str, str, str | None, bytes], timeout: float) -> tuple[list[Any], str | None]:
        """Run one call on all ranks; return the results, or a text that says what failed."""
        for rank in self.ranks:
            rank.mark_output()
            with contextlib.suppress(OSError):  # a dead worker is reported by _collect
                rank.connection.send(call)
        return self._collect(timeout)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _collect(self, timeout: float) -> tuple[list[Any], str | None]:
        """Wait for one answer of each rank; the first failure shortens the wait for the others."""
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting: dict[Connection, Rank] = {rank.connection: rank for rank in self.ranks}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    ok, payload = connection.recv()
                except (EOFError, OSError):  # the worker's end closed: it is gone
                    failures.append(rank.describe_death())
                    ok, payload = False, None
                if ok:
                    results[rank.rank] = payload
                elif payload is not None:
                    failures.append(f"rank {rank.rank} raised\n{payload.rstrip()}{rank.output()}")
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting and not failures:
            for rank in waiting.values():
                failures.append(f"rank {rank.rank} did not finish within {timeout:g} s{rank.stack()}")
        elif waiting:
            ranks = ", ".join(str(rank.rank) for rank in waiting.values())
            failures.append(f"still running when the call was ended: rank {ranks}")
        if failures:
            return [], "\n\n".join(failures)
        for rank in self.ranks:  # pytest captures it and shows it if the test fails later
            sys.stdout.write(rank.output(title=False))
        return [results[rank.rank] for rank in self.ranks], None


class Rank:
    """One worker process, its connection and its captured output."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
        self._mark = 0
        self.connection, theirs = Pipe()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = rank_environment(rank, world_size, port) | {"PYTHONPATH": path}
        arguments = (theirs, DupFd(self._log.fileno()), environment, ROOT)
        self.process = start_nursery().Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()

    def mark_output(self) -> None:
        """Forget the output so far: it belongs to earlier calls."""
        self._mark = os.fstat(self._log.fileno()).st_size

    def output(self, title: bool = True) -> str:
        """Return the last lines that this rank printed since the call began."""
        size = os.fstat(self._log.fileno()).st_size - self._mark
        text = os.pread(self._log.fileno(), size, self._mark).decode(errors="replace")
        if not text.strip():
            return ""
        lines = text.rstrip().splitlines()[-OUTPUT_LINES:]
        head = f"\noutput of rank {self.rank}:\n" if title else ""
        return head + "".join(f"[rank {self.rank}] {line}\n" for line in lines)

    def stack(self) -> str:
        """Have a hung worker print where it is, and return what it printed."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self.output()

    def describe_death(self) -> str:
        """Say how a worker ended that closed its connection."""
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            return f"rank {self.rank} closed its connection{self.stack()}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"rank {self.rank} {how}{self.output()}"

    def kill(self) -> None:
        """End the worker and what it started; nothing in it is worth waiting for."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may be too young to lead a group
        self.process.join()
        self._log.close()


_pools: dict[int, Pool] = {}
atexit.register(shutdown)
