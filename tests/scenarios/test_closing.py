"""After the last save nothing fails a run: whatever breaks or is asked for then, every rank ends with 0."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.launch import launch, start
from tests.helpers.training import nano_arguments

# main.py, in which one rank does something else at the fifth token of its sample, or at the pictures.
SCRIPT = """
import os, runpy, sys, time
import model.sampling, pretrain.plots.extension, pretrain.engine.layout
def raises(*_): raise MemoryError("no memory left")
def stops(*_): os.kill(os.getpid(), 15); time.sleep(60)
def waits(*_): print("waiting", flush=True); time.sleep(60)
def is_nan(engine): return False
act, place, ranks = globals()[os.environ["ACT"]], os.environ["PLACE"], os.environ["RANKS"]
calls, pick = [], model.sampling.pick
if os.environ["RANK"] in ranks:
    if place == "sample":
        model.sampling.pick = lambda *given: calls.append(0) or (act() if len(calls) == 5 else pick(*given))
    elif place == "weights":
        pretrain.engine.layout.weights_are_finite = act
    else:
        pretrain.plots.extension.draw_runs = act
sys.argv[0] = "pretrain/main.py"
runpy.run_path("pretrain/main.py", run_name="__main__")
"""


def arguments(tmp_path, small_folder, ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = f"--ds_config ds_configs/zero1.json --steps 2 --tensor_parallel {ranks}"
    return nano_arguments(small_folder, tmp_path, settings)


CASES = [
    (
        2,
        "raises sample 1",
        "note     no sample, everything is saved (RuntimeError: rank 1 failed: no memory left)",
    ),
    (2, "raises sample 0", "note     no sample, everything is saved (MemoryError: no memory left)"),
    (2, "raises sample 01", "note     no sample, everything is saved (MemoryError: no memory left)"),
    (2, "stops sample 1", "note     no sample, everything is saved (RuntimeError: rank 1 failed: SIGTERM)"),
    (2, "is_nan weights 1", "diverged model: its weights are not finite"),
    (
        1,
        "raises pictures 0",
        "note     no results of plots, everything is saved (MemoryError: no memory left)",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case", "line"), CASES, ids=[f"{case}, t={t}" for t, case, _ in CASES])
def test_what_fails_is_a_note_and_no_rank_hangs(tmp_path, small_folder, ranks, case, line):
    """With t = 2 both ranks take part in every pass of the sample: one alone would wait for ever."""
    act, place, on = case.split()
    variables = {"ACT": act, "PLACE": place, "RANKS": on}
    given = arguments(tmp_path, small_folder, ranks)
    finished = launch(given, ranks, env=variables, script=tmp_path / "script.py", timeout=100)
    assert finished.returncodes == [0] * ranks, finished.output
    assert line in finished.outputs[0] and "Traceback" not in finished.output
    assert "saved    " in finished.outputs[0] and "  continue " in finished.outputs[0]


@pytest.mark.slow
def test_a_signal_while_closing_ends_with_0(tmp_path, small_folder):
    variables = {"ACT": "waits", "PLACE": "pictures", "RANKS": "0"}
    with start(arguments(tmp_path, small_folder, 1), env=variables, script=tmp_path / "script.py") as running:
        running.wait_for("waiting")
        running.kill(0, signal.SIGTERM)
        finished = running.wait(30)
    assert finished.returncode == 0 and "stopped  (SIGTERM) after the last save" in finished.output
    assert "saved    " in finished.output
