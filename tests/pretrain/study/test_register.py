"""What a study expects is recorded once, and what changes afterwards is reported."""

from __future__ import annotations

import json
import subprocess

from pretrain.config.sources import ROOT
from pretrain.study.register import FILE_NAME, describe_expectations
from pretrain.study.running.scheduler import write_study
from tests.helpers.planted_runs import planned_study

STUDY = {
    "recipe": "micro",
    "seeds": 1,
    "question": "Is b better?",
    "predictions": "By 0.02.",
    "baseline": "a",
    "variants": {"a": {}, "b": {"heads": "4x4"}},
    "contrasts": ["b - a"],
}


def study(folder, **changes):
    return planned_study(folder, **(STUDY | changes))


def test_the_first_run_records_date_and_commit(tmp_path):
    assert describe_expectations(study(tmp_path)) == ["Is b better?", "Prediction: By 0.02.", "Status: open."]
    write_study(study(tmp_path))
    first = (tmp_path / FILE_NAME).read_text()
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = found.stdout.strip() or None
    assert json.loads(first)["commit"] == commit
    assert describe_expectations(study(tmp_path))[-1].endswith(f"at commit {(commit or 'unknown')[:12]}.")
    later = study(tmp_path, predictions="By 0.01.", status="confirmed", contrasts=None)
    write_study(later)
    assert (tmp_path / FILE_NAME).read_text() == first
    lines = describe_expectations(later)
    assert lines[2] == "Status: confirmed." and lines[-1] == (
        "Changed since the first run: contrasts, predictions."
    )


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    write_study(study(tmp_path))
    assert json.loads((tmp_path / FILE_NAME).read_text())["commit"] is None
