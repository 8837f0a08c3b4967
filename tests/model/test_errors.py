"""How commands end: the exit code, one line, and no traceback."""

import contextlib
import errno
import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from model.errors import UserError, run_command
from tests.helpers.launch import ROOT


def raising(error):
    def command(arguments):
        raise error

    return command


ENDS = [
    (UserError("heads: 5 does not divide"), 2, "error: heads: 5 does not divide"),
    (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), 2, "error: a.txt: No such file"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device"),
    (KeyboardInterrupt(), 130, "interrupted; go on"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS)
def test_one_line_and_the_exit_code(capsys, error, code, line):
    assert run_command(raising(error), [], "interrupted; go on") == code
    assert capsys.readouterr().err.strip() == line


def test_of_several_ranks_the_first_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run_command(raising(UserError("heads: 5")), []) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError("a defect"), OSError("of a library")])
def test_defects_keep_their_traceback(error):
    with pytest.raises(type(error), match=str(error)):
        run_command(raising(error), [])


def test_arguments_are_the_process_own_unless_given(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["program", "--a", "b"])
    assert run_command(seen.append, None) == run_command(seen.append, ("c",)) == 0
    assert seen == [["--a", "b"], ["c"]]


def test_a_reader_that_goes_away_is_no_failure():
    """``python -m pretrain.presets | head -1``"""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "pretrain.presets"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(reader)  # before it has started to print
    os.close(writer)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


def test_ctrl_c_leaves_no_traceback(tmp_path):
    """In the middle of real work: a command that waits for a file's contents."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    command = [sys.executable, "-m", "pretrain.plots", str(tmp_path)]
    listen = functools.partial(
        signal.signal, signal.SIGINT, signal.default_int_handler
    )  # not so in a background
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": listen}
    process = subprocess.Popen(command, cwd=ROOT, **options)
    writer = None
    while writer is None and process.poll() is None:
        with contextlib.suppress(OSError):  # until the command has opened the file
            writer = os.open(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "\ninterrupted\n")
    os.close(writer)
