"""benchmarks/speedrun.py: what it reads of planted metrics, what it refuses, and runs that train."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.speedrun import main, study_of_recipes, tokens_to_reach
from tests.helpers.planted_runs import plant, result

MUON = "micro_optimizer.kind_muon"
RECIPES, STEPS = ["micro", "micro --optimizer.kind muon"], ["--steps", "30"]
# Losses after 1,000, 2,000 and 3,000 tokens, for seeds 1, 2, 3.
LOSSES = {
    "micro": [(5.0, 4.0, 3.5), (5.0, 4.5, 3.0), (5.0, 4.0, 3.75)],
    MUON: [(4.0, 3.5, 3.0), (4.5, 3.75, 2.5), (5.0, 4.0, 3.8)],
}


def figures(tmp_path, *flags, recipes=RECIPES):
    out, runs = tmp_path / "out.json", str(tmp_path / "runs")
    assert main([*recipes, "--runs", runs, "--out", str(out), *flags]) == 0
    return json.loads(out.read_text())


@pytest.fixture
def planted(tmp_path):
    for run in study_of_recipes(RECIPES, [1, 2, 3], STEPS, tmp_path / "runs").runs:
        rows = [{"step": n, "tokens": 100 * n, "seconds": n / 5 - 1} for n in (10, 20, 24, 30)]
        for row, loss in zip([*rows[:2], rows[3]], LOSSES[run.variant][run.seed - 1], strict=True):
            row["val_loss"] = loss
        rows[2]["seconds"] = 3.4
        plant(result(run, rows))
    return ["--seeds", "1", "2", "3", *STEPS]


def test_planted_curves_are_read_exactly(tmp_path, planted, capsys):
    picture = tmp_path / "loss.png"
    micro, muon = figures(tmp_path, "--target", "3.75", "--plot", str(picture), *planted)["recipes"].values()
    tokens = [[run["tokens"] for run in found["runs"].values()] for found in (micro, muon)]
    assert tokens == [[2500, 2500, 3000], [1500, 2000, None]]
    # Between the rows of 2,400 and 3,000 tokens, and of 1,000 and 2,000.
    seconds = [found["runs"]["1"]["seconds"] for found in (micro, muon)]
    assert seconds == pytest.approx([3.4 + 1.6 / 6, 2.0])
    model = study_of_recipes(["micro"], [1], STEPS, tmp_path).runs[0].run.build_model_config(vocab_size=2048)
    assert muon["runs"]["1"]["FLOPs"] == 1500 * model.flops_per_token()
    assert muon["final_loss"]["difference"]["mean"] == pytest.approx((-0.5 - 0.5 + 0.05) / 3)
    text = capsys.readouterr().out
    assert f"censored {MUON}, seed 3: not reached in 3,000 tokens (lowest 3.8000)" in text
    # √(0.6 x 0.8), times and by exp(12.706 x |ln 0.6 - ln 0.8| / 2): t of one degree of freedom.
    assert " 2/3 " in text and "x 0.693 [0.111, 4.309]" in text and picture.stat().st_size > 1000


def test_targets_of_the_first_recipe(tmp_path, planted):
    assert figures(tmp_path, *planted)["targets"] == pytest.approx(dict.fromkeys("123", 10.25 / 3))
    own = figures(tmp_path, "--target", "own", *planted)
    assert own["targets"] == {"1": 3.5, "2": 3.0, "3": 3.75}
    assert [run["tokens"] for run in own["recipes"]["micro"]["runs"].values()] == [3000] * 3


def test_bad_input_is_told_in_a_line(capsys, tmp_path):
    refused = {"micr": "no recipe or file 'micr'", "tiny --target low": "target: 'low' is not valid"}
    for more, told in (refused | {"tiny --seeds 1 1": "seeds: [1, 1] is not valid"}).items():
        assert main(["micro", *more.split(), "--runs", str(tmp_path / "runs")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and told in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_runs_are_trained_once(small_folder, tmp_path, capsys):
    tiny = "--model prism-nano --steps 8 --global_batch_tokens 512 --validation.every 4 --threads 1"
    tiny += " --validation.sequences 10 --compile false --logging.wandb disabled --seeds 1 --target own"
    first = figures(tmp_path, *tiny.split(), "--data", str(small_folder), recipes=["micro"])
    again = figures(tmp_path, *tiny.split(), "--data", str(small_folder), recipes=["micro"])
    assert again == first and "to do    0 runs" in capsys.readouterr().err
    assert first["recipes"]["micro"]["tokens"]["count"] == 1


def test_tokens_to_reach():
    curve = [(100, 5.0), (200, 4.0), (300, 4.2), (400, 3.0)]
    assert tokens_to_reach(curve, 4.5) == 150
    assert tokens_to_reach(curve, 4.0) == 200
    assert tokens_to_reach(curve, 3.6) == pytest.approx(350)
    assert tokens_to_reach(curve, 4.1) == pytest.approx(190), "the first time, though it rises again"
    assert tokens_to_reach(curve, 6.0) == 100
    assert tokens_to_reach(curve, 2.9) is None and tokens_to_reach([], 1.0) is None
    assert tokens_to_reach([(100, math.nan), (200, 3.0)], 3.5) == 200
