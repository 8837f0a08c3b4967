"""Extensions can be taken away: what remains trains, resumes and reshapes to the same bits. And one can be
added."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions import EXTENSIONS
from tests.helpers.training import ROOT, TIMES

# Train, resume, reshape to another ZeRO stage: the default recipe, cut short, in one process.
PROGRAM = """
import sys
# An editable install would supply the packages that were taken away.
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
OF_EXTENSIONS = ("diagnostics/", "maturity/", "growth/", "evaluation/")
WITH_DEPENDENTS = {listed.name: {listed.name} for listed in EXTENSIONS}
for _ in EXTENSIONS:
    for listed in EXTENSIONS:
        for taken in WITH_DEPENDENTS.values():
            taken |= {listed.name} if taken & {*listed.builds_on} else set()


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


def take_away(root: Path, names: set[str]) -> None:
    """Remove extensions: their files, and their entries in the list."""
    path = root / "pretrain/extensions.py"
    begin, _, rest = path.read_text().partition("EXTENSIONS = (\n")
    entries, _, end = rest.partition("\n)\n")
    kept = []
    for entry in ("\n" + entries).split("\n    Listed(")[1:]:
        if entry.split('"')[1] not in names:
            kept.append(f"    Listed({entry}")
    path.write_text(f"{begin}EXTENSIONS: tuple[Listed, ...] = (\n" + "\n".join(kept) + f"\n)\n{end}")
    for listed in EXTENSIONS:
        for file in (listed.files or (listed.name,)) if listed.name in names else ():
            target = root / "pretrain" / file
            shutil.rmtree(target) if target.is_dir() else target.unlink()


def trained(root: Path, runs: Path, data: Path, more: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str]:
    """The rows of PROGRAM in the tree at *root*, without times and figures of extensions; and what it
    printed."""
    done = ran(root, sys.executable, "-c", PROGRAM, str(runs), str(data), *more)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in TIMES and not key.startswith(OF_EXTENSIONS)}
        for row in rows
    ], done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The rows of the whole program, and where its built-in corpus is."""
    folder = tmp_path_factory.mktemp("whole")
    return trained(ROOT, folder / "runs", folder / "data")[0], folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", [listed.name for listed in EXTENSIONS])
def test_the_rest_works_without_it(
    name: str, whole: tuple[list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    expected, data = whole
    root = copy_tree(tmp_path / "tree")
    take_away(root, WITH_DEPENDENTS[name])
    rows, _ = trained(root, tmp_path / "runs", data)
    significant = [row for row in rows if len(row) > 1]
    assert significant == [row for row in expected if len(row) > 1]


CORE = "config data optim engine checkpoint metrics run runtime utils validation"
CORE_MODULES = "test_main test_open_session test_trainer test_report"
CORE_TESTS = [
    "tests/model",
    *(f"tests/pretrain/{name}" for name in CORE.split()),
    *(f"tests/pretrain/{name}.py" for name in CORE_MODULES.split()),
]


def test_the_tests_of_the_core_are_where_this_file_says() -> None:
    """The next test is slow: a test file that moved shows here first."""
    assert not [path for path in CORE_TESTS if not (ROOT / path).exists()]


@pytest.mark.slow
def test_the_tests_of_the_core_pass_without_any(tmp_path: Path) -> None:
    root = copy_tree(tmp_path)
    take_away(root, {listed.name for listed in EXTENSIONS})
    options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    done = ran(root, sys.executable, "-m", "pytest", *options, *CORE_TESTS, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_a_record_that_is_needed_is_refused_without_its_extension(tmp_path: Path) -> None:
    grown = ["--growth.criterion", "schedule", "--growth.schedule", "{1: 2x4}", "--growth.maximum", "2"]
    data, runs = tmp_path / "data", tmp_path / "runs"
    trained(ROOT, runs, data, grown)
    root = copy_tree(tmp_path / "tree")
    take_away(root, WITH_DEPENDENTS["growth"])
    done = ran(root, sys.executable, "-c", PROGRAM, str(runs), str(data))
    assert "holds a record of the extension growth, which it needs and which is not here" in done.stderr


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
