"""After the last save nothing fails a run: whatever breaks or is asked for then, every rank ends with 0."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.launch import start
from tests.helpers.training import nano_arguments

# main.py, in which one rank does something else at the fifth token of its sample, or at the pictures.
SCRIPT = """
import os, runpy, sys, time, model.sampling as sampling, pretrain.plots.command as plots
def fail(*_): raise MemoryError("no memory left")
def stop(*_): os.kill(os.getpid(), 15); time.sleep(60)
def wait(*_): print("waiting", flush=True); time.sleep(60)
def nan(*_): import torch; return torch.full([300], float("nan"))
calls, pick, act = [], sampling.pick, globals()[os.environ["ACT"]]
if os.environ["RANK"] in os.environ["RANKS"]:
    if os.environ["PLACE"] == "sample":
        sampling.pick = lambda x, *rest: calls.append(0) or pick(len(calls) == 5 and act() or x, *rest)
    plots.draw_runs = act if os.environ["PLACE"] == "pictures" else plots.draw_runs
sys.argv[0] = "pretrain/main.py"
runpy.run_path("pretrain/main.py", run_name="__main__")
"""
CASES = {
    "2 fail sample 1": "no sample, everything is saved (RuntimeError: rank 1 failed: no memory left)",
    "2 fail sample 01": "no sample, everything is saved (MemoryError: no memory left)",
    "2 stop sample 1": "no sample, everything is saved (RuntimeError: rank 1 failed: SIGTERM)",
    "1 fail pictures 0": "no results of plots, everything is saved (MemoryError: no memory left)",
    "1 wait pictures 0": "stopped  (SIGTERM) after the last save",
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "line"), CASES.items(), ids=CASES)
def test_what_fails_is_a_note_and_no_rank_hangs(tmp_path, small_folder, case, line):
    """With t = 2 both ranks take part in every pass of the sample: one alone would wait for ever."""
    ranks, act, place, on = case.split()
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = f"--ds_config ds_configs/zero1.json --steps 2 --logging.sample 9 --tensor_parallel {ranks}"
    given = nano_arguments(small_folder, tmp_path, settings)
    variables = {"ACT": act, "PLACE": place, "RANKS": on}
    with start(given, int(ranks), env=variables, script=tmp_path / "script.py") as running:
        if act == "wait":
            running.wait_for("waiting")
            running.kill(0, signal.SIGTERM)
        finished = running.wait(100)
    assert set(finished.returncodes) == {0} and "Traceback" not in finished.output, finished.output
    assert all(part in finished.outputs[0] for part in (line, "saved    ", "  continue "))
