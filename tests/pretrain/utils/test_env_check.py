"""Variables of the environment, by kind: a value that a library would fail over is one line that names it."""

import ast
import os
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.runtime.command import prepare_process
from pretrain.utils import env_check
from pretrain.utils.env_check import VARIABLES, check_variables

FOLDERS = {name for name in VARIABLES if name.endswith(("_DIR", "_HOME", "_CACHE", "MPLCONFIGDIR"))}
JUNK = ["", " ", "nope", "-1", "0,5", "\x1b[31m", "é", "\udcff", "a,b", "no.such.host.invalid", "x" * 300]
VALID = {
    "OMP_NUM_THREADS": "1 4 4,2",
    "MASTER_ADDR": "localhost 127.0.0.1 ::1",
    "DS_ACCELERATOR": "cpu cuda",
    "WANDB_MODE": "online offline disabled",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    env_check.SET_ASIDE.clear()


@pytest.mark.parametrize("name", VARIABLES)
def test_each_kind_of_value(monkeypatch, tmp_path, name):
    use = VARIABLES[name][0]
    (tmp_path / "file").touch()
    folder = name in FOLDERS
    junk = ["", "/proc/x", "/dev/null/x", str(tmp_path / "file"), str(tmp_path / "file/x"), "x" * 300]
    for value in junk if folder else JUNK:
        monkeypatch.setenv(name, value)
        with pytest.raises(
            UserError, match=rf"^{name}: .* in the environment is not valid; .*unset it$"
        ) as raised:
            check_variables(use)
        assert str(raised.value).isprintable()
        check_variables("another use")
    for value in [str(tmp_path / "made/here")] if folder else VALID.get(name, "2").split():
        monkeypatch.setenv(name, value)
        check_variables(use)


def test_a_cache_that_is_not_used_is_no_obstacle(monkeypatch):
    """torch makes it while it is imported."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/x")
    prepare_process()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    check_variables("start", "plots")
    with pytest.raises(UserError, match=r"^TORCHINDUCTOR_CACHE_DIR: '/proc/x' in the environment"):
        check_variables("compile")


def test_text_is_opened_in_a_named_encoding():
    """Whatever the locale is."""
    root = Path(env_check.__file__).parents[2]
    unnamed = []
    for path in [*root.glob("model/*.py"), *root.glob("pretrain/**/*.py")]:
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or any(item.arg == "encoding" for item in call.keywords):
                continue
            function, given = ast.unparse(call.func), [ast.unparse(item) for item in call.args]
            name, named = function.split(".")[-1], "'utf-8'" in given or "'ascii'" in given or len(given) > 1
            text_mode = name == "open" and given and given[-1] in ("'r'", "'w'", "'a'", "'a+'", "'r+'", "'x'")
            text_file = name in ("read_text", "write_text") and not named
            keywords = {item.arg for item in call.keywords} if "subprocess" in function else set()
            if text_mode or text_file or keywords & {"text", "universal_newlines"}:
                unnamed.append(f"{path.name}:{call.lineno} {ast.unparse(call)}")
    assert unnamed == []
