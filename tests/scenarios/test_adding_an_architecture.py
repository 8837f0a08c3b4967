"""docs/adding_an_architecture.md: its diff applies, and what it adds trains, exports and comes back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from pretrain.metrics.file import read_metrics
from tests.helpers.launch import ROOT

DIFF = "\n".join(
    re.findall(
        r"```diff\n(.*?)^```$", (ROOT / "docs/adding_an_architecture.md").read_text("utf-8"), re.S | re.M
    )
)
TESTS = re.findall(r"^\+\+\+ b/(tests/.*/test_\w+\.py)$", DIFF, re.M)
TESTS += ["tests/model/test_decoding.py", "tests/pretrain/hf/test_modeling_head_schedule.py"]
OTHERS = "not scaled_down and not random"  # tests of those files that take longer
FLAGS = "--config micro --model prism-nano --steps 4 --compile false --precision fp32 --validation.every 0"
FLAGS += " --architecture.ffn_output_norm true"


@pytest.fixture
def changed(tmp_path):
    """A copy of the code with the page's diff."""
    copy = tmp_path / "copy"
    for name in ("model", "pretrain", "ds_configs", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    # Without GIT_DIR, git apply takes the copy for a part of a repository around it, and applies nothing.
    environment = os.environ | {"GIT_DIR": "/nonexistent"}
    command = ["git", "apply", "--verbose", "-"]
    done = subprocess.run(command, cwd=copy, env=environment, input=DIFF, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "ffn_output_norm" in (copy / "model/config.py").read_text("utf-8")
    return copy


def test_the_diff_applies(changed):
    counts = "[nano.replace(ffn_output_norm=on).num_parameters() for on in (False, True)]"
    program = f"from model import preset; nano = preset('prism-nano'); print(*{counts})"
    without, normed = map(int, run(changed, "-c", program).split())
    assert normed - without == 4 * 48  # layers, and d_model


@pytest.mark.slow
def test_from_config_to_export_and_back(changed, small_folder):
    run(changed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", OTHERS, *TESTS)
    flags = [*FLAGS.split(), "--data", str(small_folder)]
    run(changed, "-m", "pretrain.main", *flags, "--name", "whole", "--threads", "1")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run(changed, *launcher, "pretrain/main.py", *flags, "--name", "cut", "--tensor_parallel", "2")
    one, two = (
        [row["train_loss"] for row in read_metrics(changed / "runs" / name)] for name in ("whole", "cut")
    )
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-5)
    plan = run(changed, "-m", "pretrain.plan", "--config", "354m", "--architecture.ffn_output_norm", "true")
    assert "353,921,024 parameters" in plan
    assert "equal argmax 100.00%" in run(changed, "-m", "pretrain.convert", "runs/whole", "--out", "hf")
    assert "equal argmax 100.00%" in run(
        changed, "-m", "pretrain.convert", "--from_hf", "hf", "--out", "runs/again"
    )


def run(folder, *arguments):
    """What a Python process with the changed code prints."""
    environment = os.environ | {"PYTHONPATH": str(folder), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
