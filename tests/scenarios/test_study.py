"""A study from its file to its report, with runs that really train."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.helpers.launch import ROOT
from tests.helpers.training import curve

pytestmark = pytest.mark.slow


def write_file(folder, data):
    """Two schedules, two seeds, twelve steps: a few seconds of training each."""
    values = {
        "title": "Two schedules",
        "recipe": "micro",
        "seeds": 2,
        "settings": {
            "model": "prism-nano",
            "data": str(data),
            "steps": 12,
            "global_batch_tokens": 512,
            "validation": {"every": 4, "sequences": 10},
            "checkpoint": {"every": 4, "background": False},
            "diagnostics_every": 12,
            "compile": False,
            "threads": 1,
            "logging": {"wandb": "disabled"},
        },
        "baseline": "uniform",
        "variants": {"uniform": {"heads": "4x4"}, "prism": {}},
    }
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def study(*arguments):
    return [sys.executable, "-m", "pretrain.study", *map(str, arguments)]


def finish(*arguments):
    done = subprocess.run(study(*arguments), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reported(folder):
    """The report's page without the study's name and the time of its first run."""
    page = (folder / "report" / "index.html").read_text().replace(folder.name, "")
    return re.sub(r"First run [^<]*", "", page)


def test_a_study_that_was_stopped_ends_as_one_that_was_not(small_folder, tmp_path):
    file = write_file(tmp_path, small_folder)
    text = finish("run", file, "--out", tmp_path / "whole", "--parallel", "2")
    assert "4 of 4 finished, 0 failed" in text
    finish("report", tmp_path / "whole")

    folder = tmp_path / "stopped"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            study("run", file, "--out", folder, "--parallel", "1"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        metrics = folder / ("uniform-s1" if number == signal.SIGINT else "prism-s1") / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.is_file() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == (130 if number == signal.SIGINT else 75), output
        assert re.search(r"^continue head-schedules study run .* --parallel 1$", output, re.MULTILINE), output
    finish("run", folder)  # the folder says the rest
    finish("report", folder)

    for name in ("uniform-s1", "prism-s1", "uniform-s2", "prism-s2"):
        assert curve(folder / name) == curve(tmp_path / "whole" / name)
    assert reported(folder) == reported(tmp_path / "whole")
