"""Where a curve first crosses the target, and recipes compared by seed, on planted metrics."""

import json
import math

import pytest

from benchmarks.speedrun import Curve, curve_of, ratios, table
from model.presets import preset


def test_a_run_is_read_and_crosses_between_two_validations(tmp_path):
    model = preset("prism-nano")
    rows = [
        {"step": 0, "tokens": 0, "val_loss": 6.0},
        {"step": 1, "tokens": 100, "tokens_per_second": 50.0},
        {"step": 2, "tokens": 200, "tokens_per_second": 100.0, "val_loss": 5.0},
        {"step": 4, "tokens": 400, "tokens_per_second": 100.0, "val_loss": 4.0},
        {"step": 6, "tokens": 600, "tokens_per_second": 50.0, "val_loss": 4.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "latest").write_text("step_000006\n")
    saved = tmp_path / "checkpoints" / "step_000006"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"model": model.to_json()}))
    curve = curve_of(tmp_path)
    assert (curve.tokens, curve.seconds, curve.losses) == ([200, 400, 600], [3.0, 5.0, 9.0], [5.0, 4.0, 4.5])
    # A quarter of the way from 5 to 4.
    assert curve.until(4.75) == pytest.approx((250, 250 * model.flops_per_token(), 3.5))
    assert curve.until(5.5) == pytest.approx((200, 200 * model.flops_per_token(), 3.0))
    assert curve.until(3.9) is None


def test_ratios_leave_out_seeds_that_do_not_reach_the_target():
    def run(tokens: float, last: float = 1.0) -> Curve:
        return Curve([tokens], [tokens / 10], [last], 2.0)

    curves = {"a": [run(100), run(200), run(100)], "b": [run(50), run(50), run(10, last=3.0)]}
    tokens, flops, seconds = ratios(curves, "b", 2.0)
    assert tokens == flops == seconds and tokens.count == 2
    assert math.exp(tokens.mean) == pytest.approx(math.sqrt(0.5 * 0.25))
    lines = table(curves, 2.0)
    assert "3 of 3" in lines[1] and "2 of 3" in lines[2] and "0.354 [" in lines[2]
