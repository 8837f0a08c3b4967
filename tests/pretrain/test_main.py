"""The program as a user starts it: real processes, exit codes, and what is printed."""

import random
import signal
import subprocess
import sys

import pytest

from pretrain.metrics.file import read_metrics
from tests.helpers.distributed import run_distributed
from tests.helpers.launch import assert_refused, launch, start
from tests.helpers.small_disk import small_disk
from tests.helpers.training import ROOT, curve, nano_arguments, nano_run, session


def test_bad_input(small_folder, tmp_path):
    finished = launch(nano_arguments(small_folder, tmp_path, "--ds_config ds_configs/zero4.json"))
    assert_refused(finished, "ds_config: cannot read 'ds_configs/zero4.json'")
    assert not (tmp_path / "nano").exists()


@pytest.mark.slow
def test_launcher_trains_to_the_end_and_the_same_command_says_so(small_folder, tmp_path):
    arguments = nano_arguments(small_folder, tmp_path)
    first = launch(arguments, 2, launcher="deepspeed")
    assert first.returncode == 0, first.output
    for text in (
        "12/12",
        "val loss",
        "bits/byte",
        "lr 2.00e-05",
        "grad norm",
        "tokens/s",
        "MFU",
        "left",
        "sample",
        "guessing by token frequency",
        "python -m pretrain.convert",
        "--steps 24",
        f"run      {tmp_path}/nano",
        "2 ranks",
    ):
        assert text in first.output, first.output
    assert first.output.count("step 12/12") == 1  # only rank 0 prints
    again = launch(arguments, 2)
    assert again.returncode == 0 and "is already finished at step 12" in again.output


@pytest.mark.parametrize(
    ("seed", "launcher"), [pytest.param(0, "deepspeed", marks=pytest.mark.slow), (1, "direct")]
)
def test_kill_9_at_any_step_and_the_same_command_again(small_folder, tmp_path, seed, launcher):
    """Real processes, killed without warning; the curve must not show it, nor who started them."""
    more = "--logging.every 1 --logging.seconds 0"
    whole = nano_run(small_folder, tmp_path, "--name whole", more)
    assert run_distributed(session, 2, whole, 1, timeout=120) == [([], None)] * 2
    broken = nano_arguments(small_folder, tmp_path, "--name broken --ds_config ds_configs/zero1.json", more)
    step = random.Random(seed).randint(5, 11)
    with start(broken, 2) as running:
        running.wait_for(f"step {step:>2}/12")
        running.kill(rank=seed)
        running.wait(60)
    resumed = launch(broken, 2, launcher=launcher)
    assert resumed.returncode == 0, resumed.output
    assert "resume   from" in resumed.output
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_diverged_run_stops_and_keeps_its_checkpoint(small_folder, tmp_path):
    settings = "--steps 40 --optimizer.learning_rate 1e30 --schedule.warmup 0.9 --max_skipped_steps 3"
    finished = launch(nano_arguments(small_folder, tmp_path, settings, "--checkpoint.every 1"))
    assert_refused(finished, "max_skipped_steps: 3 updates in a row were skipped")
    assert "is kept" in finished.output
    rows = read_metrics(tmp_path / "nano")
    assert rows[-1]["skipped"] == 3


@pytest.mark.slow
def test_full_disk(small_folder, tmp_path):
    """A real one: a small tmpfs."""
    with small_disk(tmp_path / "disk", "3500k") as disk:
        finished = launch(nano_arguments(small_folder, disk, "--checkpoint.keep_last 5"))
        assert_refused(finished, "No space left on device")
        assert "the checkpoint of step 4 stays" in finished.output
        assert [path.name for path in (disk / "nano/checkpoints").iterdir()] == ["step_000004"]


@pytest.mark.slow
def test_interrupt_says_how_to_go_on(small_folder, tmp_path):
    settings = "--steps 100000 --logging.every 1 --logging.seconds 0"
    arguments = nano_arguments(small_folder, tmp_path, settings)
    with start(arguments) as running:
        running.wait_for("step      8/")
        running.kill(signal_number=signal.SIGINT)
        finished = running.wait(60)
    assert finished.returncode == 130 and "the same command continues" in finished.output
    assert "Traceback" not in finished.output


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


def test_help_names_the_recipes():
    shown = subprocess.run(
        [sys.executable, "pretrain/main.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0 and "757m" in shown.stdout and "--global_batch_tokens" in shown.stdout


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
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "imported []"
