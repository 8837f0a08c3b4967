"""An extension can be added."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.training import ROOT

# Train, resume, reshape to another ZeRO stage: the default recipe, cut short, in one process.
PROGRAM = """
import sys
# An editable install would supply the packages of another tree.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
from pretrain.main import main
from pretrain.runtime.signals import StopListener
runs, data, *more = sys.argv[1:]
flags = "--vocab_size 512 --name run --global_batch_tokens 512 --validation.every 2 --validation.sequences 4"
flags = f"{flags} --checkpoint.every 2 --compile false --logging.wandb disabled".split()
flags += ["--data_root", data, "--runs_dir", runs, *more]
for stage, steps in ((2, 2), (2, 4), (3, 6)):
    main([f"--ds_config=ds_configs/zero{stage}.json", "--steps", str(steps), *flags], StopListener(), 0)
"""


def ran(root: Path, *command: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    """A command that has run in *root*."""
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout)


def copy_tree(to: Path) -> Path:
    """All files, without what git ignores."""
    listed = ran(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed.check_returncode()
    for name in listed.stdout.split():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def trained(root: Path, runs: Path, data: Path, more: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str]:
    """The rows of PROGRAM in the tree at *root*, and what it printed."""
    done = ran(root, sys.executable, "-c", PROGRAM, str(runs), str(data), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows, done.stdout


LINE = """    Listed(
        "best_loss",
        settings="pretrain.best_loss.settings:BestLossSettings",
        in_run="pretrain.best_loss.extension:BestLoss",
    ),
"""


@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    root = copy_tree(tmp_path / "tree")
    shutil.copytree(ROOT / "examples/best_loss", root / "pretrain/best_loss")
    path = root / "pretrain/extensions.py"
    path.write_text(path.read_text().replace("EXTENSIONS = (\n", f"EXTENSIONS = (\n{LINE}"))
    page = (ROOT / "docs/architecture.md").read_text()
    assert LINE.strip() in page, "the page shows this line"
    rows, printed = trained(root, tmp_path / "runs", tmp_path / "data", ["--best_loss", "true"])
    losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    best = {row["step"]: row["best_loss"] for row in rows if "best_loss" in row}
    assert best and all(losses[step] == loss for step, loss in best.items())
    state = json.loads((tmp_path / "runs/run/checkpoints/step_000006/state.json").read_text())
    step, loss = min(losses.items(), key=lambda item: item[1])
    assert state["records"]["best_loss"]["values"] == {"loss": loss, "step": step}
    assert f"best     validation loss {loss:.4f}, after step {step}" in printed
