"""Run pretrain/main.py, or another script, as real processes: for tests of the whole program.

    finished = launch(["--ds_config", "ds_configs/zero1.json", "--steps", "3"], world_size=2)
    assert finished.returncode == 0, finished.output

    with start(arguments) as running:          # a run to be killed
        running.wait_for("step 5/")
        running.kill(rank=0)

By default the ranks are started directly, with the environment that a launcher would give them: ten seconds
faster than the ``deepspeed`` command, which ``launcher="deepspeed"`` uses instead. Ranks of the training are
forks of a process that has imported the libraries (nursery.py), unless variables are given for them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tests.helpers.nursery import ForkedScript

ROOT = Path(__file__).resolve().parents[2]
MAIN = "pretrain/main.py"
# After a rank failed, the others get this long to end on their own, as under a launcher.
GRACE = 10.0


def free_port() -> int:
    """A port that nothing listens on, below those that systems give to outgoing connections meanwhile."""
    for port in random.Random().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("no free port found")


@dataclass(frozen=True)
class Finished:
    """How a launch ended."""

    returncode: int
    """Exit status of the rank that failed first, 0 if none failed."""
    returncodes: list[int]
    """Exit status of each rank (of the launcher, when one was used); negative for a signal."""
    outputs: list[str]
    """What each rank printed, standard output and standard error together."""

    @property
    def output(self) -> str:
        """Everything that was printed, one rank after the other."""
        return "\n".join(self.outputs)


class Running:
    """Processes that were started and not yet waited for."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        cwd: Path,
        forked: bool = False,
    ) -> None:
        self._logs: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115
        self.processes: list[Any] = [
            ForkedScript(command, environment, cwd, log.fileno())
            if forked
            else subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that close() also ends the ranks below a launcher
                # A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            for command, environment, log in zip(commands, environments, self._logs, strict=True)
        ]

    def output(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        log = self._logs[rank].fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def wait_for(self, text: str, timeout: float = 120, rank: int = 0) -> None:
        """Return as soon as *text* was printed; fail if the process ends or *timeout* seconds pass before."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            ended = self.processes[rank].poll() is not None and text not in self.output(rank)
            assert not ended, f"rank {rank} ended without {text!r}:\n{self.output(rank)}"
            late = time.monotonic() > deadline
            assert not late, f"no {text!r} from rank {rank} in {timeout:g} s:\n{self.output(rank)}"
            time.sleep(0.02)

    def kill(self, rank: int | None = None, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank or to all; kill -9 unless another one is named."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            process.send_signal(signal_number)

    def wait(self, timeout: float = 300) -> Finished:
        """Wait for the end. When a rank fails the others are ended soon after, as a launcher does it."""
        deadline = time.monotonic() + timeout
        failed = 0  # the status of the first rank that did not end well
        while any(process.poll() is None for process in self.processes):
            failed = failed or next((code for process in self.processes if (code := process.poll())), 0)
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                if not failed:
                    self.close()
                    outputs = "\n".join(self.output(rank)[-4000:] for rank in range(len(self.processes)))
                    raise AssertionError(f"still running after {timeout:g} s:\n{outputs}")
                self.close()
            time.sleep(0.02)
        return Finished(
            failed or next((process.returncode for process in self.processes if process.returncode), 0),
            [process.returncode for process in self.processes],
            [self.output(rank) for rank in range(len(self.processes))],
        )

    def close(self) -> None:
        """End what is still running."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.send_signal(signal.SIGKILL)  # one that is too young to lead a group
            process.wait()


def on_gpus() -> bool:
    return os.environ.get("DS_ACCELERATOR") != "cpu"


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher tells one of *size* ranks of this machine."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def start(
    args: Sequence[str],
    world_size: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    env_of: Mapping[int, Mapping[str, str]] | None = None,
    script: str | Path = MAIN,
    launcher: Literal["direct", "deepspeed"] = "direct",
    cwd: Path = ROOT,
    forked: bool | None = None,
) -> Iterator[Running]:
    """Start *script* with *args* on *world_size* ranks; what still runs at the end of the block is killed.

    Args:
        env: variables to set in addition; OMP_NUM_THREADS is 1 unless given here, so that runs
            with different numbers of ranks have the same number of threads each.
        env_of: rank -> variables of that rank alone; not for a launcher.
        forked: whether ranks are forks that have imported the libraries; by default where *env* and *env_of*
            are empty and the training runs on CPUs.
    """
    if forked is None:
        forked = launcher == "direct" and script == MAIN and not env and not env_of and not on_gpus()
    script = str(ROOT / script)
    base = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    # DeepSpeed and the scripts find the tools of this environment (ninja, deepspeed) as if it were activated.
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", "")])
    port = free_port()
    if launcher == "deepspeed":
        command = ["deepspeed", "--num_accelerators", str(world_size), "--master_port", str(port)]
        running = Running([[*command, script, *args]], [base], cwd)
    else:
        own = [base | rank_environment(rank, world_size, port) for rank in range(world_size)]
        environments = [variables | dict((env_of or {}).get(rank, {})) for rank, variables in enumerate(own)]
        command = [script, *args] if forked else [sys.executable, "-u", script, *args]
        running = Running([command] * world_size, environments, cwd, forked)
    try:
        yield running
    finally:
        running.close()


def launch(args: Sequence[str], world_size: int = 1, *, timeout: float = 300, **options: Any) -> Finished:
    """Run a script to its end, with the arguments of ``start``. Fails after *timeout* seconds."""
    with start(args, world_size, **options) as running:
        return running.wait(timeout)
