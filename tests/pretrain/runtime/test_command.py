"""How commands end: the exit code, one line, and no traceback."""

import errno
import re
import sys
import tempfile

import pytest

from model.errors import DivergedError, MachineError, UserError
from pretrain.runtime.command import run_command


def raising(error):
    def command(arguments):
        raise error

    return command


LOST = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
FULL = f"fatal: No space left on device; temporary files are in {tempfile.gettempdir()}: make room there"
FULL += ", or set TMPDIR to another folder"
ENDS = [
    (UserError("heads: 5 does not divide"), 2, "error: heads: 5 does not divide"),
    (MachineError("MASTER_PORT: it is taken"), 1, "error: MASTER_PORT: it is taken"),
    (DivergedError("max_skipped_steps: 10"), 3, "error: max_skipped_steps: 10"),
    (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), 2, "error: a.txt: No such file"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device"),
    (RuntimeError("C++ compile error\nas: fatal: No space left on device\nx"), 2, f"error: as: {FULL}"),
    (KeyboardInterrupt(), 130, "interrupted; go on"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS)
def test_one_line_and_the_exit_code(capsys, error, code, line):
    assert run_command(raising(error), [], "interrupted; go on") == code
    assert capsys.readouterr().err.strip() == line


def test_of_several_ranks_the_first_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(raising(UserError("heads: 5")), []) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError("of a library"), LOST])
def test_defects_keep_their_traceback(error):
    with pytest.raises(type(error), match=re.escape(str(error))):
        run_command(raising(error), [])


def test_arguments_are_the_process_own_unless_given(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["program", "--a", "b"])
    assert run_command(seen.append, None) == run_command(seen.append, ("c",)) == 0
    assert seen == [["--a", "b"], ["c"]]
