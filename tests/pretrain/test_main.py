"""The program as a user starts it: real processes, exit codes, and what is printed."""

import random
import subprocess
import sys

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch, start
from tests.helpers.training import ROOT, curve, nano_arguments, nano_run, session


@pytest.mark.slow
def test_launcher_trains_to_the_end_and_the_same_command_says_so(small_folder, tmp_path):
    arguments = nano_arguments(small_folder, tmp_path)
    first = launch(arguments, 2, launcher="deepspeed")
    assert first.returncode == 0, first.output
    figures = ["12/12", "val loss", "bits/byte", "lr 2.00e-05", "grad norm", "tokens/s", "MFU", "left"]
    around = ["unigram baseline", "python -m pretrain.convert", "--steps 24", "sample", "2 ranks"]
    for text in (*figures, *around, f"run      {tmp_path}/nano"):
        assert text in first.output, first.output
    assert first.output.count("step 12/12") == 1  # only rank 0 prints
    again = launch(arguments, 2)
    assert again.returncode == 0 and "is already finished at step 12" in again.output


def test_kill_9_at_any_step_and_the_same_command_again(small_folder, tmp_path):
    """Real processes, killed without warning; the curve must not show it."""
    more = "--logging.every 1 --logging.seconds 0"
    whole = nano_run(small_folder, tmp_path, "--name whole", more)
    assert run_distributed(session, 2, whole, 1, timeout=120) == [([], None)] * 2
    broken = nano_arguments(small_folder, tmp_path, "--name broken --ds_config ds_configs/zero1.json", more)
    step = random.Random(1).randint(5, 11)
    with start(broken, 2) as running:
        running.wait_for(f"step {step:>2}/12")
        running.kill(rank=1)
        running.wait(60)
    resumed = launch(broken, 2)
    assert resumed.returncode == 0, resumed.output
    assert "resume   from" in resumed.output
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_follows_the_fused_optimizer(small_folder, tmp_path, stage):
    """DeepSpeedCPUAdam (compiled at first use) against torch's fused AdamW, in fp32."""
    for name in (f"zero{stage}", f"zero{stage}_offload"):
        settings = f"--name {name} --ds_config ds_configs/{name}.json"
        finished = launch(nano_arguments(small_folder, tmp_path, settings), timeout=600)
        assert finished.returncode == 0, finished.output
    plain, offloaded = (curve(tmp_path / name) for name in (f"zero{stage}", f"zero{stage}_offload"))
    for row, other in zip(plain, offloaded, strict=True):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_training_imports_only_what_it_uses(small_folder, tmp_path):
    """Of the libraries for tracking, export and evaluation: none, unless a setting asks for it."""
    code = (
        "import atexit, runpy, sys\n"
        "names = {'wandb', 'transformers', 'lm_eval', 'datasets', 'megatron'}\n"
        "atexit.register(lambda: print('imported', sorted(names & set(sys.modules)), flush=True))\n"
        "sys.argv[0] = 'pretrain/main.py'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = nano_arguments(small_folder, tmp_path, "--steps 1")
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "imported []"
