"""The first lines of docs/cluster.md for machines without SLURM: deepspeed with a hostfile, and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT, free_port, launch
from tests.helpers.training import curve, nano_arguments


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_two_ranks_by_another_launcher(small_folder, tmp_path, launcher):
    arguments = [
        "--ds_config",
        "ds_configs/zero1.json",
        *nano_arguments(small_folder, tmp_path, "--steps", "4"),
    ]
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
    done = subprocess.run(
        [*command, "pretrain/main.py", *arguments],
        cwd=ROOT, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world    2 ranks" in done.stdout
    reference = [*arguments, "--name", "reference"]
    finished = launch(reference, 2)
    assert finished.returncode == 0, finished.output
    assert curve(tmp_path / "nano") == curve(tmp_path / "reference")
