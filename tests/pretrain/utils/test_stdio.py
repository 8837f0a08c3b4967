"""Standard output that is lost, closed, full or of a narrow encoding ends nothing."""

import os
import subprocess
import sys

import pytest

OUTPUTS = [">&$closed", ">/dev/full 2>/dev/full", ">&- 2>&-"]
TEXT = "print('\\u00e9 \\ud800 \\u6f22' * 3000, flush=True)"
TRAINING = f"""
from pretrain.utils.stdio import outlive_output
outlive_output()
for _ in range(3): {TEXT}
open(ARGV, 'w').write('went on')
"""
COMMAND = f"""
from pretrain.runtime.command import run_command
def command(arguments): {TEXT}
raise SystemExit(run_command(command, None))
"""


def run(code, path, redirected="", **variables):
    reader, writer = os.pipe()
    os.close(reader)
    line = f'exec {sys.executable} -c "$code" {redirected.replace("$closed", str(writer))}'
    environment = {**os.environ, **variables, "code": code.replace("ARGV", repr(str(path)))}
    done = subprocess.run(
        line, shell=True, executable="/bin/bash", env=environment, pass_fds=[writer], stdout=-1
    )
    os.close(writer)
    return done


@pytest.mark.parametrize("redirected", OUTPUTS, ids=["a pipe without a reader", "a full disk", "closed"])
def test_training_outlives_its_output(tmp_path, redirected):
    assert run(TRAINING, tmp_path / "file", redirected).returncode == 0
    assert (tmp_path / "file").read_text() == "went on"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252:strict"])
@pytest.mark.parametrize("code", [TRAINING, COMMAND], ids=["training", "command"])
def test_any_text_is_printed(tmp_path, code, encoding):
    done = run(code, tmp_path / "file", LC_ALL="C", PYTHONIOENCODING=encoding)
    name = encoding.partition(":")[0]
    assert done.returncode == 0
    assert done.stdout.startswith("\u00e9 \ud800 \u6f22".encode(name, "backslashreplace"))
