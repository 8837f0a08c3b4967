"""A rank that fails shows its traceback; the ranks that lose it say one line, later."""

from __future__ import annotations

import time

import pytest

from pretrain.runtime.exit import lost_peer
from tests.helpers.launch import start
from tests.helpers.training import nano_arguments


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_who_lost_another(error, expected):
    assert lost_peer(error) == expected
    try:
        try:
            raise error
        except type(error) as cause:
            raise KeyError("later") from cause
    except KeyError as wrapped:
        assert lost_peer(wrapped) == expected


BROKEN = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import pretrain.trainer as trainer
original = trainer.Trainer._count
def count(self, applied):
    original(self, applied)
    if self.state.step == 3 and self.world.rank == 1:
        raise ZeroDivisionError("of this rank")
trainer.Trainer._count = count
runpy.run_path({root!r} + "/pretrain/main.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_failing_rank_comes_first(small_folder, tmp_path):
    from tests.helpers.launch import ROOT

    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT)))
    arguments = ["--ds_config", "ds_configs/zero1.json", *nano_arguments(small_folder, tmp_path)]
    with start(arguments, 2, script=script) as running:
        running.processes[1].wait(timeout=120)
        failed = time.monotonic()
        running.processes[0].wait(timeout=60)
        assert time.monotonic() - failed < 30
        finished = running.wait()
    assert finished.returncodes == [1, 1]
    own, other = finished.outputs[1], finished.outputs[0]
    assert "error: rank 1 on " in own and "ZeroDivisionError: of this rank" in own and "Traceback" in own
    assert "error: rank 0 on " in other and "lost another rank, which says why above" in other
    assert "Traceback" not in other
