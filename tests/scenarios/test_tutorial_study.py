"""The tutorial on studies: its files and commands, as a reader uses them, with shorter runs."""

import re
from pathlib import Path

import pytest
import yaml

from pretrain.study.command import main
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs/tutorial_study.md").read_text("utf-8")
SHORT = {"steps: 200": "steps: 12", "every: 100, sequences: 64": "every: 12, sequences: 8"}


@pytest.mark.slow
def test_files_and_commands_do_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data") if (ROOT / "data").is_dir() else None
    names = re.findall(r"Save this as\s+`(\w+\.yaml)`", PAGE)
    files = dict(zip(names, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL), strict=True))
    for name, text in files.items():
        for long, short in SHORT.items():
            text = text.replace(long, short)
        Path(name).write_text(text)
    printed = ""
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            program, command, *arguments = line.split()
            assert (program, command) == ("head-schedules", "study")
            assert main(arguments) == 0, line
            printed += capsys.readouterr().out
    assert "runs     9 of 9 finished, 0 failed" in printed
    assert "runs     12: 2 variants x 6 seeds, in runs/confirm" in printed
    assert "wrote results/order.json" in printed and printed.count("wrote runs/order/report/") == 2
    assert yaml.safe_load(files["order.yaml"])["seeds"] == 3
