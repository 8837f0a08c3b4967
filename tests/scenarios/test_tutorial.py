"""The tutorial's commands, one after the other, as a reader types them; its two trainings are cut short."""

import re
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.tutorials import run_commands

PAGE = ROOT / "docs/tutorial.md"
SHORT = "--steps 12 --validation.every 6 --compile false"


def commands():
    """The page's commands but for the set-up."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [block for block in blocks if not block.startswith("make setup")]


@pytest.mark.slow
def test_its_commands_do_what_it_says(tmp_path):
    found = commands()
    assert len(found) == 8
    script = "\n".join(found).replace("head-schedules train", f"head-schedules train {SHORT}")
    done = run_commands(script, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert re.search(r"^import ", done.stdout, re.MULTILINE)  # the model's continuation, in transformers
    for path in ("curves.png", "runs/descending/plots/training.png", "hf/ascending/model.safetensors"):
        assert Path(tmp_path, path).is_file(), path
    assert any((tmp_path / "plots").rglob("*.png"))
