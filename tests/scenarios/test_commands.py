"""Commands end as the shell expects: without a traceback, whatever ends them."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

from tests.helpers.launch import ROOT


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
