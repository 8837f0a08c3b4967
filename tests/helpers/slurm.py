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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.launch import ROOT, free_port

NODES = ("n1", "n2")
# Two daemons of one host differ in node name and port. cred_expire shortens the two minutes that a
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
        here = {"host": socket.gethostname(), "cpus": os.cpu_count()}
        text = CONFIGURATION.format(folder=folder, port=ports[0], port1=ports[1], port2=ports[2], **here)
        (folder / "slurm.conf").write_text(text)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        _start_munge()
        self.call("slurmctld", "-i")
        for node in NODES:
            self.start_node(node)
        self.wait_until(lambda: self.call("sinfo", "-h", "-o", "%T").split() == ["idle"], 60, "idle nodes")

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self.call("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """kill -9 of a node's slurmd."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)

    def call(self, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        """Run a SLURM command and return what it prints; it must succeed."""
        variables = {**self.environment, **(env or {})}
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Job:
        """sbatch; options come before the script."""
        number = self.call("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip()
        return Job(self, number)

    def wait_until(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for *condition*, or fail after *seconds* with the ends of the daemons' logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s\n{self.logs()}"
            time.sleep(0.1)

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
        for process in _processes("SLURM_CONF", str(self.folder / "slurm.conf")):
            with contextlib.suppress(psutil.Error):
                process.kill()


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

        def there() -> bool:
            ended = self.state in ENDED  # before the log is read, which is then whole
            found = self.log.count(text) >= times
            assert found or not ended, f"the job ended without {text!r}:\n{self.log}\n{self.cluster.logs()}"
            return found

        self.cluster.wait_until(there, seconds, f"{text!r} of job {self.number}")

    def wait(self, seconds: float = 300) -> str:
        """Wait for the end and return the state it ended in."""
        self.cluster.wait_until(lambda: self.state in ENDED, seconds, f"end of job {self.number}")
        return self.state

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

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of this job whose command line holds *word*."""
        found = _processes("SLURM_JOB_ID", self.number)
        return [process for process in found if any(word in part for part in process.cmdline())]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that ends with the block."""
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.close()


def _start_munge() -> None:
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0:
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    command = ["su", "-s", "/bin/sh", "munge", "-c", "munged"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _processes(variable: str, value: str) -> list[psutil.Process]:
    """Other processes in whose environment a variable has a value."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
    return found
