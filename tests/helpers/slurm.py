"""A real SLURM of two nodes on this machine: slurmctld and two slurmd, for the tests that submit jobs.

Needs root and Debian's packages slurm-wlm and munge; ``unavailable()`` says what is missing.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.helpers.launch import ROOT, free_port

NODES = ("n1", "n2")
# Two daemons of one host are told apart by node name and port. cred_expire shortens the two minutes that a
# requeued job otherwise waits before it may start again; SlurmdTimeout is how soon a node without its daemon
# counts as down.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,batch_sched_delay=0,bf_interval=5
SlurmdTimeout=10
KillWait=30
MinJobAge=600
ReturnToService=2
JobRequeue=1
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs={cpus} State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
# What the scripts of slurm/ take from the environment: this one, also where it is not the checkout's own.
ENVIRONMENT = {"VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")


def unavailable() -> str | None:
    """Why no SLURM can be started here, or None."""
    if getpass.getuser() != "root":
        return "needs root"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else None


class Cluster:
    """A running SLURM; commands see it through ``environment``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = [free_port() for _ in range(3)]
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                folder=folder,
                port=ports[0],
                port1=ports[1],
                port2=ports[2],
                cpus=os.cpu_count(),
            )
        )
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        _start_munge()
        self._daemon("slurmctld", "-i")
        for node in NODES:
            self.start_node(node)
        self.wait_until(lambda: self.call("sinfo", "-h", "-o", "%T").split() == ["idle"], 60, "idle nodes")

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._daemon("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """kill -9 of a node's slurmd."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)

    def call(self, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        """Run a SLURM command and return what it prints; it must succeed."""
        done = subprocess.run(
            command,
            env={**self.environment, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Job:
        """sbatch; options come before the script."""
        number = self.call("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip()
        return Job(self, number)

    def wait_until(self, condition, seconds: float, what: str) -> None:
        """Wait for *condition*, or fail after *seconds*."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s\n{self.logs()}"
            time.sleep(0.25)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def end_jobs(self) -> None:
        """Kill all jobs, batch scripts first, so that none has itself requeued."""
        self.call("scancel", "--user=root", "--full", "--signal=KILL")
        self.call("scancel", "--user=root")
        self.wait_until(lambda: not self.call("squeue", "-h").strip(), 60, "empty queue")

    def close(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(Exception):
            self.end_jobs()
        for path in self.folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        for process in _processes_below(self.folder):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _daemon(self, *command: str) -> None:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


class Job:
    """A submitted job."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    @property
    def record(self) -> dict[str, str]:
        """What scontrol says of the job."""
        text = self.cluster.call("scontrol", "show", "job", "--oneliner", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    @property
    def state(self) -> str:
        """RUNNING, COMPLETED, ..."""
        return self.record["JobState"]

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return int(self.record["Restarts"])

    @property
    def log(self) -> str:
        """What the job has printed so far, over all its lives."""
        path = Path(self.record["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, seconds: float = 120, times: int = 1) -> None:
        """Wait until the log holds *text*, or fail with the log."""
        deadline = time.monotonic() + seconds
        while self.log.count(text) < times:
            ended = self.state in ENDED and self.log.count(text) < times
            assert not ended, (
                f"the job ended ({self.state}) without {text!r}:\n{self.log}\n{self.cluster.logs()}"
            )
            assert time.monotonic() < deadline, (
                f"no {text!r} in {seconds:g} s:\n{self.log}\n{self.cluster.logs()}"
            )
            time.sleep(0.1)

    def wait(self, seconds: float = 300) -> str:
        """Wait for the end and return the state it ended in."""
        deadline = time.monotonic() + seconds
        while (state := self.state) not in ENDED:
            assert time.monotonic() < deadline, (
                f"{state} after {seconds:g} s:\n{self.log}\n{self.cluster.logs()}"
            )
            time.sleep(0.25)
        return state

    def wait_for_array(self, seconds: float) -> None:
        """Wait until no task of this array is left in the queue."""
        self.cluster.wait_until(
            lambda: self.number not in self.cluster.call("squeue", "-h", "-o", "%F"),
            seconds,
            "end of the array",
        )

    def signal(self, name: str) -> None:
        """scancel --signal: to the tasks, as a time limit does it, not to the batch script."""
        self.cluster.call("scancel", f"--signal={name}", self.number)

    def processes(self, words: Sequence[str]) -> list[int]:
        """Process numbers of this job whose command line has all *words*."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"SLURM_JOB_ID={self.number}" in environment and all(word in command for word in words):
                    found.append(int(path.name))
        return sorted(found)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that ends with the block."""
    running: Cluster | None = None
    try:
        running = Cluster(folder)
        yield running
    finally:
        if running is not None:
            running.close()


def _start_munge() -> None:
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0:
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    subprocess.run(
        ["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=True, capture_output=True, timeout=60
    )


def _processes_below(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            if f"SLURM_CONF={folder}/slurm.conf" in environment and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found
