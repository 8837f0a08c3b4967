"""What a study expects, with the date and the commit at which its first run began."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from typing import Any, cast

from model.declared import declared, from_dict, to_dict
from pretrain.config.sources import ROOT
from pretrain.study.planned import Study
from pretrain.utils.files import write_atomically
from pretrain.utils.parsing import read_json

FILE_NAME = "registered.json"


@declared()
class Registered:
    """A record that does not change once it is made."""

    date: str
    """UTC, as 2026-11-27 13:05."""
    commit: str | None
    """None outside a checkout of git, and without git."""
    expected: dict[str, Any]
    """The file's question, predictions, contrasts and primary."""


def expectations(study: Study) -> dict[str, Any]:
    """What should be written down before a study runs, without keys that the file lacks."""
    file = to_dict(study.file)
    return {key: file[key] for key in ("question", "predictions", "contrasts", "primary") if file[key]}


def register(study: Study) -> None:
    """Record what the study expects in its folder; what an earlier run or the archive has recorded stays."""
    if (made := read_registered(study)) is None:
        # Where it is installed as a wheel, git would find another repository around it.
        git = ["git", f"--git-dir={ROOT / '.git'}", "rev-parse", "HEAD"]
        commit = None
        with contextlib.suppress(OSError):  # without git
            done = subprocess.run(git, capture_output=True, encoding="utf-8")
            commit = done.stdout.strip() if done.returncode == 0 else None
        made = Registered(time.strftime("%Y-%m-%d %H:%M", time.gmtime()), commit, expectations(study))
    text = json.dumps(to_dict(made), indent=1, ensure_ascii=False) + "\n"
    write_atomically(study.folder / FILE_NAME, text)


def read_registered(study: Study) -> Registered | None:
    """The record of the study's folder or archive; None before the first run."""
    path = study.folder / FILE_NAME
    if study.recorded is not None and study.recorded.archive.registered is not None and not study.pilots_of:
        return cast(Registered, study.recorded.archive.registered)
    return from_dict(Registered, read_json(path, "study"), f"study: {path}") if path.exists() else None


def describe_expectations(study: Study) -> list[str]:
    """Question, predictions and status, when they were written down, and whether they have changed since."""
    found = read_registered(study)
    lines = [study.file.question] if study.file.question else []
    lines += [f"Prediction: {each}" for each in study.file.predictions or ()]
    lines.append(f"Status: {study.file.status}.")
    if found is not None:
        lines.append(f"First run {found.date} UTC, at commit {(found.commit or 'unknown')[:12]}.")
        now = expectations(study)
        if changed := [
            key for key in sorted({*found.expected, *now}) if found.expected.get(key) != now.get(key)
        ]:
            lines.append(f"Changed since the first run: {', '.join(changed)}.")
    return lines
