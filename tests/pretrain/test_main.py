"""The program as a user starts it: real processes, exit codes, and what is printed."""

import contextlib
import fcntl
import os
import pty
import random
import struct
import subprocess
import sys
import termios

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.launch import launch, start
from tests.helpers.training import ROOT, curve, nano_arguments, nano_run, session


@pytest.mark.slow
def test_launcher_trains_to_the_end_and_the_same_command_says_so(small_folder, tmp_path):
    arguments = nano_arguments(small_folder, tmp_path, "--logging.sample 9")
    first = launch(arguments, 2, launcher="deepspeed")
    assert first.returncode == 0, first.output
    figures = ["12/12", "val loss", "bits/byte", "lr 2.00e-05", "grad norm", "tokens/s", "MFU", "left"]
    around = [
        "unigram baseline",
        "--out hf/nano",
        "--steps 24",
        "sample",
        "ranks    2, on",
    ]
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
def test_the_opening_lines_fit_a_screen(small_folder, tmp_path):
    """On a terminal of 80 columns; the last of them says how long compiling takes."""
    arguments = nano_arguments(small_folder, tmp_path, "--steps 1 --compile true")
    written = on_terminal([sys.executable, "pretrain/main.py", *arguments], columns=80)
    opening = written.partition("| starting")[0].splitlines()[:-1]
    assert opening[0].startswith("start    loading PyTorch and DeepSpeed")
    assert len(opening) < 24
    assert [line for line in opening if len(line) > 80 and str(tmp_path) not in line] == []
    assert "".join(opening).count("compile  yes: the first step compiles") == 1
    later = [line for line in written.splitlines() if line.startswith(("step 1/1", "    ", "finished"))]
    assert later and max(map(len, later)) <= 80
    assert not any("(" in line for line in opening if line.startswith(("engine", "kernels")))
    again = [*arguments, "--name", "verbose", "--verbose"]
    verbose = subprocess.run(
        [sys.executable, "pretrain/main.py", *again], cwd=ROOT, capture_output=True, text=True
    ).stdout
    for label in ("source   ", "epochs   ", "MFU      = tokens/s x"):
        assert f"\n{label}" in verbose and f"\n{label}" not in written
    assert "; fused: LM head and loss (" in verbose
    assert curve(tmp_path / "verbose") == curve(tmp_path / "nano")


def on_terminal(command, columns):
    """What a command writes to a terminal of so many columns, with plain line ends."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    running = subprocess.Popen(command, cwd=ROOT, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # when the last process has closed it
        while part := os.read(controller, 1 << 16):
            written += part
    os.close(controller)
    assert running.wait(60) == 0, written.decode()
    return written.decode().replace("\r\n", "\n").replace("\r", "\n")


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
    """Of the libraries for tracking, export, evaluation and compiling: none, unless a setting asks for it."""
    code = (
        "import atexit, runpy, sys\n"
        "names = {'wandb', 'transformers', 'lm_eval', 'datasets', 'megatron', 'torch._inductor.compile_fx'}\n"
        "atexit.register(lambda: print('imported', sorted(names & set(sys.modules)), flush=True))\n"
        "sys.argv[0] = 'pretrain/main.py'; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = nano_arguments(small_folder, tmp_path, "--steps 1")
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "imported []"
