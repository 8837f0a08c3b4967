"""The programs of examples/ run as they are, in a folder of the user's own."""

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

PROGRAMS = {
    "own_schedule": ["heads 1,4,16,4", "step 100: loss "],
    "own_text": ["validation loss: ", "def"],
    "own_hook": ["norms    ", "weight_norm/layer_3"],
    "own_study": ["16,8,4,2  2 of 2", "wrote "],
    "growing_heads": ["heads (", "from scratch: "],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs(tmp_path, name):
    program, environment = ROOT / "examples" / f"{name}.py", os.environ | {"PYTHONPATH": str(ROOT)}
    environment["WANDB_MODE"] = "disabled"
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not [said for said in PROGRAMS[name] if said not in done.stdout], done.stdout[-3000:]


def test_every_program_is_run():
    programs = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert programs == {*PROGRAMS, "best_loss"}, "tests/pretrain/run/test_hooks.py trains with that hook"
