"""Without SLURM, as docs/cluster.md has it: deepspeed with a hostfile, torchrun, and a launcher that is
killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.checkpoint.manifest import verify
from tests.helpers.launch import ROOT, free_port, launch, start
from tests.helpers.training import curve, nano_arguments


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_ranks_by_another_launcher(small_folder, tmp_path, launcher):
    arguments = nano_arguments(small_folder, tmp_path, "--ds_config ds_configs/zero1.json --steps 4")
    if launcher == "deepspeed":
        (tmp_path / "hostfile").write_text("localhost slots=2\n")
        command = ["deepspeed", "--hostfile", str(tmp_path / "hostfile"), "--master_port", str(free_port())]
        # As on every node of a cluster without ssh; this machine need not be reachable over it.
        command += ["--no_ssh", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    else:
        endpoint = f"localhost:{free_port()}"
        command = ["torchrun", "--nnodes", "1", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
        command += ["--rdzv_endpoint", endpoint]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command += ["pretrain/main.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks    2, on" in done.stdout
    reference = [*arguments, "--name", "reference"]
    finished = launch(reference, 2)
    assert finished.returncode == 0, finished.output
    assert curve(tmp_path / "nano") == curve(tmp_path / "reference")


@pytest.mark.slow
def test_ranks_save_and_stop_when_their_launcher_is_killed(small_folder, tmp_path):
    """The deepspeed command on one node passes no signal on, and its ranks would train to the end."""
    arguments = nano_arguments(small_folder, tmp_path, "--ds_config ds_configs/zero1.json --steps 100000")
    with start(arguments, 2, launcher="deepspeed") as running:
        running.wait_for("grad norm")
        running.kill(signal_number=signal.SIGTERM)
        running.processes[0].wait()
        deadline = time.monotonic() + 60
        while "stopped" not in running.output() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "has gone" in running.output()
    saved = sorted((tmp_path / "nano" / "checkpoints").glob("step_*"))
    assert saved and verify(saved[-1]) is None
