"""Commands in a folder of the user's own, beside files of his that have the names of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pretrain.config.sources import find_ds_config
from tests.helpers.launch import ROOT
from tests.helpers.marks import slow
from tests.helpers.training import nano_arguments

SHADOWS = ("model.py", "yaml.py", "datasets.py", "random.py")
MAIN = "import sys; from pretrain.cli import main; sys.argv[0] = 'head-schedules'; sys.exit(main())"
PRESETS = "import sys; from pretrain.presets import main; sys.exit(main())"


def run(folder, *command, root=ROOT, **environment):
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def beside(tmp_path):
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('a file of the user was imported')")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("-m", "pretrain.presets", "prism-nano"), "prism-nano "),
        (
            ("-P", "-c", PRESETS, "prism-nano"),
            "prism-nano ",
        ),  # as an installed script, which does not look here
        (("-m", "pretrain.main", "--steps", "-1"), "error: steps: -1 is not valid"),
        (("-P", "-c", MAIN, "train", "--steps", "-1"), "error: steps: -1 is not valid"),
        ((str(ROOT / "pretrain/main.py"), "--steps", "-1"), "error: steps: -1 is not valid"),
    ],
    ids=str,
)
def test_beside_files_with_names_of_ours(beside, command, said):
    done = run(beside, *command)
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["zero3", "zero3.json", "ds_configs/zero3.json"])
def test_ds_configs_by_name(monkeypatch, beside, name):
    monkeypatch.chdir(beside)
    assert Path(find_ds_config(name)).samefile(ROOT / "ds_configs/zero3.json")
    (beside / "zero3.json").write_text("{}")
    assert Path(find_ds_config(name)).exists()
    assert find_ds_config("zero3.json") == "zero3.json"  # one's own comes first


@pytest.mark.parametrize("encoding", ["ascii", *slow([None])])
def test_a_locale_without_utf_8(beside, encoding):
    """Arguments are text; what the terminal does not have is a number."""
    environment = {"PYTHONUTF8": "0", "LC_ALL": "POSIX"} | (
        {"PYTHONIOENCODING": encoding} if encoding else {}
    )
    done = run(beside, "-m", "pretrain.main", "--steps", "größe", **environment)
    quoted = "gr\\xf6\\xdfe" if encoding else "größe"
    assert done.returncode == 2 and done.stderr.startswith(f"error: steps: '{quoted}' is not valid"), (
        done.stderr
    )


@pytest.mark.slow
def test_a_wheel_trains(small_folder, beside):
    """Its packages unpacked in a folder of their own."""
    source = beside / "source"
    for name in ("model", "pretrain", "ds_configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(beside))
    built = run(beside, "-P", "-m", "pip", "wheel", str(source), *options)
    assert built.returncode == 0, built.stderr
    [wheel] = beside.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(beside / "installed")
    for number, name in enumerate(("zero2", "ds_configs/zero3.json")):
        settings = ("--steps 2", "--ds_config", name, f"--name n{number}")
        arguments = nano_arguments(small_folder, beside / "runs", *settings)
        done = run(beside, "-P", "-c", MAIN, "train", *arguments, root=beside / "installed")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"continue  {Path(sys.executable).name} -P -c " in done.stdout
