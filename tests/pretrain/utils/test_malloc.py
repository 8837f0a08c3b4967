"""What a tensor on a CPU frees is kept: later tensors cost no page faults."""

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

PROGRAM = """
import os, resource
{prepare}
import torch
torch.ones(2**26)  # 256 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**23 + 2**22)  # 48 MiB, 12,288 pages of 4 KiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
os._exit(0)  # the process group's threads need not end
"""
KEEP = "from pretrain.utils.malloc import keep_freed_memory; print(keep_freed_memory())"
START = """
from pretrain.engine.patches import prepare_deepspeed
from pretrain.runtime.world import start_world
prepare_deepspeed()
print(start_world(1, False).device.type)
"""


def printed(prepare, **variables):
    """The last two words: what *prepare* prints, and the page faults of a tensor after a larger one was
    freed; with *variables* the first alone."""
    kept = {
        name: os.environ[name] for name in os.environ if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    environment = kept | {"DS_ACCELERATOR": "cpu"} | variables
    command = [sys.executable, "-c", prepare if variables else PROGRAM.format(prepare=prepare)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()[-2:]


@pytest.fixture(scope="module")
def kept():
    done, faults = printed(KEEP)
    if done == "False":
        pytest.skip("glibc's malloc only")
    return int(faults)


@pytest.mark.slow
def test_pages_of_freed_tensors_are_used_again(kept):
    _, without = printed("print('untouched')")
    assert 10 * kept < int(without)


@pytest.mark.slow
def test_a_run_on_a_cpu_does_it(kept):
    device, faults = printed(START)
    assert device == "cpu" and int(faults) < 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_environments_settings_stay(variables):
    assert printed(KEEP, **variables)[0] == "False"
