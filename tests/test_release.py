"""What a release consists of: the lists of packages, the lower bounds that are tested, notes, workflows."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOTES = """# Changelog

## 0.2.0 (unreleased)

- not yet

## 0.1.1 - 2026-12-01

### Fixed

- a thing

## 0.1.0 - 2026-11-01

- first
"""


def required(*extras):
    """The requirements of an installation with these extras, those of nested ones included."""
    found = {}
    for text in [*PROJECT["dependencies"], *(text for name in extras for text in EXTRAS[name])]:
        requirement = Requirement(text)
        found |= (
            required(*requirement.extras)
            if requirement.name == PROJECT["name"]
            else {requirement.name: requirement}
        )
    return found


@pytest.mark.parametrize("extra", ["all", "dev"])  # dev is what make setup installs
def test_one_extra_brings_every_library(extra):
    libraries = {"torch", "deepspeed", "megatron-core", "datasets", "sentencepiece", "wandb", "lm-eval"}
    assert libraries <= set(required(extra))


def test_the_lowest_versions_are_the_lower_bounds():
    command = [sys.executable, ".ci/lower-bounds"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pinned = {requirement.name: requirement for requirement in map(Requirement, printed.split())}
    for name, requirement in required("dev", "gcs").items():
        if lower := [part.version for part in requirement.specifier if part.operator == ">="]:
            assert str(pinned.pop(name).specifier) == f"=={lower[0]}", name
            assert requirement.specifier.contains(Version(lower[0]))
    assert not pinned


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release-notes", tmp_path / ".ci")
    (tmp_path / "CHANGELOG.md").write_text(NOTES)

    def notes(version):
        command = [tmp_path / ".ci/release-notes", version]
        return subprocess.run(command, cwd="/", capture_output=True, text=True)

    assert notes("0.1.1").stdout.strip() == "### Fixed\n\n- a thing"
    assert notes("0.1.0").stdout.strip() == "- first"
    for version, message in (("0.2.0", "unreleased"), ("0.3.0", "has no section 0.3.0")):
        done = notes(version)
        assert done.returncode == 1 and done.stdout == "" and message in done.stderr


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_start_what_there_is_and_may_read_alone(name):
    text = (ROOT / f".github/workflows/{name}.yml").read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"} and "group" in workflow["concurrency"]
    writing = [job for job, parts in workflow["jobs"].items() if "permissions" in parts]
    assert writing == (["publish"] if name == "release" else [])
    scripts = set(re.findall(r"\.ci/[\w-]+", text))
    assert scripts and all(os.access(ROOT / script, os.X_OK) for script in scripts)
    targets = set(re.findall(r"make ([a-z-]+)", text))
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text("utf-8") for target in targets)


def test_every_python_that_is_listed_is_tried():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    tried = {entry["python"] for entry in workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]}
    listed = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python :: 3." in text}
    assert tried == listed and f">={min(listed, key=Version)}" == PROJECT["requires-python"]
