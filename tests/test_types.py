"""Static type checkers know every setting."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOUND = """
from pretrain import RunConfig, recipe, train
from pretrain.config.growth import GrowthConfig
from pretrain.config.sections import OptimizerConfig

run = RunConfig(steps=3, optimizer=OptimizerConfig(learning_rate=1e-3), growth=GrowthConfig(start=2))
heads: int = run.growth.start
rate: float = run.optimizer.learning_rate * run.lr_rules[0].scale
"""
TYPOS = """
run.stepz
RunConfig(stepz=3)
run.optimizer.learning_rat
run.muon.momentun
run.schedule.warm_up
run.validation.evry
run.checkpoint.keep_lst
run.logging.wandb_projct
run.interruption.minuts
run.growth.activ
GrowthConfig(strat=2)
run.diagnostics.sequence
run.maturity.patiance
run.evaluation.task
run.lr_rules[0].scal
run.profil
run.hook
run.tasks
RunConfig(task="regression")
OptimizerConfig(kind="sgd")
steps: str = run.steps
"""


@pytest.mark.slow  # a minute where mypy has no cache
def test_mypy_finds_planted_typos(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(SOUND + TYPOS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "pyproject.toml",
        "--no-error-summary",
        str(file),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error: " in line}
    first = SOUND.count("\n") + 1
    expected = {first + number for number, line in enumerate(TYPOS.splitlines()) if line}
    assert lines == expected, found.stdout + found.stderr
