"""Compiled code is loaded only from folders that no other user can write to or could have made."""

from __future__ import annotations

import getpass
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.utils.env_check import (
    VARIABLES,
    check_variables,
    keep_compiled_code_private,
    private_cache,
    private_folder_problem,
)
from tests.helpers.launch import launch
from tests.helpers.training import nano_arguments

OTHER = 12345
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def planted(path, mode=0o777, owner=None, link=False):
    """A folder as another user may leave it at a predictable name."""
    folder = path.with_name(f"{path.name}.behind") if link else path
    folder.mkdir()
    folder.chmod(mode)
    if link:
        path.symlink_to(folder)
    if owner is not None:
        os.lchown(path, owner, owner)
    return path


HOSTILE = [
    pytest.param({"owner": OTHER, "mode": 0o700}, "belongs to another user", marks=root),
    pytest.param({"owner": OTHER, "mode": 0o777}, "belongs to another user", marks=root),
    pytest.param({"owner": OTHER, "mode": 0o700, "link": True}, "belongs to another user", marks=root),
    *[({"mode": mode}, "others can write to it") for mode in (0o777, 0o775, 0o757, 0o1777, 0o720, 0o702)],
    ({"mode": 0o777, "link": True}, "others can write to it"),
]


@pytest.mark.parametrize(("how", "reason"), HOSTILE)
def test_folders_that_others_can_write_to(monkeypatch, tmp_path, how, reason):
    folder = str(planted(tmp_path / "cache", **how))
    assert reason in str(private_folder_problem(folder))
    for name, (use, find_problem) in VARIABLES.items():
        if find_problem is private_folder_problem:
            monkeypatch.setenv(name, folder)
            with pytest.raises(UserError, match=rf"^{name}: .*{reason}.*unset it$"):
                check_variables(use)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    chosen, note = private_cache(folder, "code")
    assert chosen == f"{tmp_path}/mine/head_schedules/code" and private_folder_problem(chosen) is None
    assert note == f"compiled code is kept in {chosen}, not in {folder!r}: " + str(note).split(": ", 1)[1]
    assert reason in note
    Path(chosen).chmod(0o777)
    with pytest.raises(UserError, match=r"^XDG_CACHE_HOME: compiled code cannot be kept in"):
        private_cache(folder, "code")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
@pytest.mark.parametrize("link", [False, True])
def test_folders_of_this_user(tmp_path, mode, link):
    folder = str(planted(tmp_path / "cache", mode, link=link))
    assert private_folder_problem(folder) is None and private_cache(folder, "code") == (folder, None)


def test_a_folder_is_made_so_that_nobody_else_can_write_to_it(tmp_path):
    before = os.umask(0)
    try:
        assert private_folder_problem(str(tmp_path / "a")) is None
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_folder_that_others_can_replace(tmp_path, mode, safe):
    around = planted(tmp_path / "scratch", mode)
    problem = private_folder_problem(str(around / "cache"))
    assert (problem is None) == safe and (safe or "others can replace it" in problem)


@pytest.mark.parametrize("user", ["somebody", "a/b:c*d"])
def test_the_folder_is_the_one_that_torch_takes(monkeypatch, tmp_path, user):
    """Also after the temporary folder was replaced, since another user had made torch's in it."""
    package = Path(importlib.util.find_spec("torch").origin).parent
    spec = importlib.util.spec_from_file_location("names", package / "_inductor/runtime/cache_dir_utils.py")
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert keep_compiled_code_private() is None
    made = Path(names.default_cache_dir())
    assert made.parent == tmp_path and made.is_dir()
    made.chmod(0o777)
    said = keep_compiled_code_private()
    assert "others can write to it" in str(said) and keep_compiled_code_private() == said
    assert names.default_cache_dir() == f"{tmp_path}/mine/head_schedules/{made.name}"
    assert os.environ["TMPDIR"] == f"{tmp_path}/mine/head_schedules"
    assert private_folder_problem(names.default_cache_dir()) is None


@pytest.mark.slow
def test_a_run_loads_no_code_that_others_could_have_planted(monkeypatch, small_folder, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that compiles
    folder = planted(tmp_path / f"torchinductor_{getpass.getuser()}")
    arguments = nano_arguments(
        small_folder, tmp_path / "runs", "--heads", "2x4", "--steps", "2", "--compile", "true"
    )
    variables = {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "mine")}
    done = launch(arguments, env=variables, timeout=300)
    assert done.returncode == 0 and "others can write to it" in done.output, done.output
    assert not list(folder.iterdir())
    assert list((tmp_path / f"mine/head_schedules/{folder.name}").glob("**/*.so"))
    refused = launch(
        [*arguments, "--name", "b"], env={**variables, "TORCHINDUCTOR_CACHE_DIR": str(folder)}, timeout=300
    )
    assert refused.returncode == 2 and not list(folder.iterdir()), refused.output
    messages = [line for line in refused.output.splitlines() if not line.startswith("start ")]
    assert len(messages) == 1 and messages[0].startswith("error: TORCHINDUCTOR_CACHE_DIR: "), refused.output
