"""The folder that an export or import writes: of two at once one wins; other people's files are not blamed on
it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import UserError
from pretrain.hf.new_folder import new_folder
from tests.helpers.launch import ROOT

WRITE = """
import sys
from pathlib import Path
from model.errors import UserError
from pretrain.hf.new_folder import new_folder
try:
    overwrite = {"None": None, "True": True, "False": False}[sys.argv[2]]
    with new_folder(Path(sys.argv[1]), 10, overwrite) as partial:
        (partial / "config.json").write_text(sys.argv[3])
        print("begun", flush=True)
        sys.stdin.readline()
        (partial / "weights").write_text(sys.argv[3])
except UserError as error:
    print("error:", error, flush=True)
    sys.exit(2)
"""


def writer(out: Path, overwrite: str, mark: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITE, str(out), overwrite, mark]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("overwrite", ["False", "None", "True"])
def test_of_two_at_once_one_wins(tmp_path, overwrite):
    """Both are in the middle of writing when the first one ends."""
    out = tmp_path / "hf" / "model"
    both = [writer(out, overwrite, mark) for mark in ("first", "second")]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
    said = [process.communicate("\n", timeout=30)[0] for process in both]
    if overwrite == "True":  # the second one finds what it may replace
        assert [process.returncode for process in both] == [0, 0] and said == ["", ""]
    else:
        assert [process.returncode for process in both] == [0, 2]
        assert said[0] == "" and "was written by another process in the meantime" in said[1]
    kept = "second" if overwrite == "True" else "first"
    assert {path.name: path.read_text() for path in out.iterdir()} == {"config.json": kept, "weights": kept}
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_file_that_cannot_be_read_is_not_blamed_on_out(tmp_path):
    out, source = tmp_path / "model", tmp_path / "step_000002" / "tokenizer.json"
    with (
        pytest.raises(UserError, match=rf"^convert: cannot read {source}: No such file"),
        new_folder(out, 1, False) as partial,
    ):
        shutil.copyfile(source, partial / "tokenizer.json")
    with (
        pytest.raises(UserError, match=rf"^out: cannot write .*{out.name}.*: No such file"),
        new_folder(out, 1, False) as partial,
    ):
        (partial / "a" / "b").write_text("")
    with pytest.raises(UserError, match=r"^out: cannot write .*: No space left"), new_folder(out, 1, False):
        raise OSError(28, "No space left on device", str(source))  # as shutil does, which copies from there
    assert list(tmp_path.iterdir()) == []
