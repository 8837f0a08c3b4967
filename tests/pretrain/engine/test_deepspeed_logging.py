"""Commands that keep DeepSpeed quiet still use the GPUs that are there, and say nothing of this machine
elsewhere."""

import os
import subprocess
import sys

import pytest

from tests.helpers.marks import slow

PROGRAM = """
import os, sys
import torch
count = int(sys.argv[1])
torch.cuda.is_available = lambda: count > 0
torch.cuda.device_count = lambda: count
from pretrain.engine.deepspeed_logging import environment_elsewhere, quiet_libraries
quiet_libraries()
from pretrain.runtime.hardware import detect_device
print(detect_device(), os.environ.get("DS_ACCELERATOR"), environment_elsewhere().get("DS_ACCELERATOR"))
"""


@pytest.mark.parametrize(
    ("gpus", "asked", "device", "here", "elsewhere"),
    [
        (1, None, "cuda:0", None, None),
        *slow([(1, "cpu", "cpu", "cpu", "cpu")]),
        *slow([(0, None, "cpu", "cpu", None)]),  # found, not asked for: a job of SLURM may have GPUs
    ],
)
def test_the_device_is_that_of_the_machine(gpus, asked, device, here, elsewhere):
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment |= {"DS_ACCELERATOR": asked} if asked else {}
    command = [sys.executable, "-c", PROGRAM, str(gpus)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split()[-3:] == [device, str(here), str(elsewhere)], ran.stderr
