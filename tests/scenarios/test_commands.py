"""Commands end as the shell expects: without a traceback, whatever ends them."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launch import ROOT

RUN, MODEL = "run: 'nowhere' is not a run's folder", "model: 'nowhere' is not a folder or does not exist"
ANSWERED = {
    "convert nowhere --out x": RUN,
    "diagnostics.command nowhere": RUN,
    "growth.report.command report nowhere": RUN,
    "generate nowhere": MODEL,
    "evaluation.command nowhere --tasks piqa": MODEL,
}


@pytest.mark.parametrize(("command", "message"), ANSWERED.items())
def test_a_wrong_folder_is_answered_before_torch_is_imported(command, message):
    module, *arguments = command.split()
    program = f"import sys; sys.modules['torch'] = None; from pretrain.{module} import main; sys.exit(main())"
    run = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr, done.stderr


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
    """In the middle of real work: a command that waits for the rest of a text."""
    text = tmp_path / "text.txt"
    os.mkfifo(text)
    command = [sys.executable, "-m", "pretrain.prepare", "--text", str(text), "--out", str(tmp_path / "out")]
    # In the background of a shell the signal would be ignored.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    options = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": listen}
    process = subprocess.Popen(command, cwd=ROOT, **options)
    with text.open("wb"):  # waits until the command has opened it
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert said.endswith("interrupted; run the same command again to resume\n")
