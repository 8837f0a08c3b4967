"""Runs whose heads grow, continued otherwise than they began: without growth, again with it, in another
world."""

import pytest
import torch

from model.config import ModelConfig
from pretrain.checkpoint.state import read_features, read_state
from pretrain.growth import hook
from pretrain.growth.hook import CAPTURED, Growth
from tests.helpers.distributed import run_distributed
from tests.helpers.items import write_data_sets
from tests.helpers.shapes import Shape, build
from tests.helpers.training import curve, interrupted, nano_run, session

INCRT = """--growth.criterion incrt --growth.interval 2 --growth.calibration 1 --growth.maximum 5
    --growth.grow_above 1e-6 --growth.dwell 0 --growth.until 20 --validation.every 0
    --checkpoint.keep_last 9"""


def nano(data, runs, flags):
    return nano_run(data, runs, *flags.split())


def heads_at(run, step):
    return ModelConfig.from_json(read_state(run.folder / f"checkpoints/step_{step:06d}").model).heads


def opening_of(run):
    return build(run, Shape(1, 2)).announce()


def test_growth_that_was_off_goes_on_with_what_it_knew(small_folder, tmp_path):
    run = nano(small_folder, tmp_path, f"{INCRT} --steps 3")
    assert run_distributed(session, 1, run)[0][1] is None
    assert heads_at(run, 3) == (2, 2, 2, 2)
    off = nano(small_folder, tmp_path, "--steps 5 --checkpoint.keep_last 9")
    assert run_distributed(session, 1, off)[0][1] is None
    assert heads_at(run, 5) == (2, 2, 2, 2)
    on = nano(small_folder, tmp_path, f"{INCRT} --steps 7")
    assert run_distributed(session, 1, on)[0][1] is None
    assert heads_at(run, 7) == (3, 3, 3, 3)
    before, after = (read_features(run.folder / f"checkpoints/step_{step:06d}") for step in (3, 7))
    for layer in range(4):
        known, now = before[f"{CAPTURED}{layer}"], after[f"{CAPTURED}{layer}"]
        assert len(known) == 1 and len(now) == 2 and torch.equal(now[:1], known)


def test_a_run_stopped_before_its_first_check_goes_on_without_growth(small_folder, tmp_path):
    run = nano(small_folder, tmp_path, "--growth.criterion incrt --steps 2")
    assert run_distributed(session, 1, run)[0][1] is None
    fixed = nano(small_folder, tmp_path, "--steps 3")
    assert run_distributed(session, 1, fixed)[0][1] is None
    assert heads_at(run, 3) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        # Four checks, 24 steps apart (60 by gradient, whose checks cost more).
        ("incrt", "checked every 24 steps up to 72, decided from step 96 on"),
        ("incrt --growth.grow_above 0.1 --growth.until 23", "up to 23, decided from step 24 on"),
        ("gradient --growth.calibration 2 --growth.budget 5", "5 in all; checked every 60 steps up to 72, "),
        ("incrt --growth.interval 5", "checked every 5 steps up to 72, decided from step 20 on"),
        ('schedule --growth.schedule {"9":"2x4"}', "at most 4 heads a layer; at steps 9"),
    ],
)
def test_a_run_says_when_it_can_grow(small_folder, tmp_path, flags, said):
    run = nano(small_folder, tmp_path, f"--steps 80 --growth.maximum 4 --growth.criterion {flags}")
    lines = run_distributed(opening_of, 1, run)[0]
    assert said in lines[0]
    # In 80 steps the last check comes before the first decision, but for short intervals and a schedule.
    stays = any("the heads stay as they are: the last check" in line for line in lines)
    assert stays == (not flags.startswith("schedule") and "interval" not in flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "random --growth.maximum 1",
            "the heads stay as they are: no head can be added; give more growth.max",
        ),
        ("gradient --growth.budget 4", "the heads stay as they are: no head can be added"),
        ("incrt --growth.maximum 1", "no head can be added until one is pruned; give more growth.maximum"),
        ("random --growth.maximum 2", None),
    ],
)
def test_a_run_says_that_it_cannot_grow(small_folder, tmp_path, flags, said):
    run = nano(small_folder, tmp_path, f"--steps 80 --growth.interval 5 --growth.criterion {flags}")
    notes = [line for line in run_distributed(opening_of, 1, run)[0] if "no head can be added" in line]
    assert bool(notes) == (said is not None) and all(said in line for line in notes)


def test_a_grown_run_is_not_given_other_heads(small_folder, tmp_path):
    schedule = '--growth.criterion schedule --growth.schedule {"1":"2x4"} --growth.head_dim 16'
    run = nano(small_folder, tmp_path, f"{schedule} --steps 2 --validation.every 0")
    assert run_distributed(session, 1, run)[0][1] is None
    for flags, refused in (
        ("--heads 4x4", "heads: '4x4' is new, and the run keeps its heads, 2x4 of width 16x4; leave it out"),
        ("--architecture.head_dim [8,8,8,8]", "architecture.head_dim: [8, 8, 8, 8] is new"),
        ("--growth.criterion random --growth.head_dim 8", "growth.head_dim: 8 is new"),
    ):
        more = nano(small_folder, tmp_path, f"--steps 3 --validation.every 0 {flags}")
        assert run_distributed(session, 1, more)[0][1].startswith(refused)
    for step, given in enumerate(("--heads 2x4 --architecture.head_dim 16", f"--model {run.folder}"), 3):
        more = nano(small_folder, tmp_path, f"--steps {step} --validation.every 0 {given}")
        assert run_distributed(session, 1, more)[0][1] is None
        assert heads_at(run, step) == (2, 2, 2, 2)


def test_a_run_that_begins_to_grow_late_says_what_it_still_can(small_folder, tmp_path):
    assert run_distributed(session, 1, nano(small_folder, tmp_path, "--steps 4"))[0][1] is None
    for flags, said, stays in (
        ("random --growth.interval 2 --growth.calibration 2", "decided from step 8 on", False),
        ("random --growth.interval 2 --growth.calibration 4", "decided from step 12 on", True),
        ('schedule --growth.schedule {"2":"3x4"}', "at steps 2", True),
        ('schedule --growth.schedule {"2":"3x4","6":"3x4"}', "at steps 2, 6", False),
    ):
        run = nano(small_folder, tmp_path, f"--steps 9 --growth.maximum 4 --growth.criterion {flags}")
        lines = run_distributed(opening_of, 1, run)[0]
        assert said in lines[0] and any("heads stay as they are" in line for line in lines) == stays


def a_check_of_broken_activations(run):
    opened = build(run, Shape(1, 2))
    engine = opened.trainer.engine
    growth = Growth(opened)
    measured = hook.second_moments
    hook.second_moments = lambda *given: [moment * torch.nan for moment in measured(*given)]
    try:
        result = growth.run(engine, opened.state, {})
    finally:
        hook.second_moments = measured
    return result.values, result.lines, [name for name in growth.state() if "moment" in name]


def test_activations_that_are_not_finite_are_not_measured(small_folder, tmp_path):
    run = nano(small_folder, tmp_path, f"{INCRT} --steps 9")
    values, lines, moments = run_distributed(a_check_of_broken_activations, 1, run)[0]
    assert values == {} and moments == []
    assert lines == ["growth   step 0: not checked; activations are not finite"]


@pytest.mark.slow
def test_growth_in_another_world(small_folder, tmp_path):
    """One rank at stage 2, then two at t = 2 with sequence parallelism, then two that share the data at stage
    3."""
    flags = f"{INCRT} --steps 11 --growth.head_dim 12 --micro_batch 2 --checkpoint.every 0"
    whole, run = (nano(small_folder, tmp_path / name, flags) for name in ("whole", "other"))
    assert run_distributed(session, 1, whole)[0][1] is None
    run_distributed(interrupted, 1, run, 5, 1, 2)
    split = nano(small_folder, tmp_path / "other", f"{flags} --tensor_parallel 2 --sequence_parallel true")
    run_distributed(interrupted, 2, split, 9, 2, 2, timeout=120)
    assert run_distributed(session, 2, run, 3, timeout=120)[0][1] is None
    states = [read_state(r.folder / "checkpoints/step_000011") for r in (whole, run)]
    expected, found = (state.record("growth")["events"] for state in states)
    assert len(expected) == 16 and heads_at(run, 11) == (5, 5, 5, 5)
    for event, other in zip(expected, found, strict=True):
        close = {name: pytest.approx(event.pop(name), rel=1e-3) for name in ("gamma", "lambda_max")}
        assert other == event | close
    losses = [[row["train_loss"] for row in curve(r.folder) if "train_loss" in row] for r in (whole, run)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_grown_run_is_scored(small_folder, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    from pretrain.evaluation import command as evaluation

    schedule = '--growth.criterion schedule --growth.schedule {"1":"1,2,1,2"} --growth.head_dim 16'
    run = nano(small_folder, tmp_path, f"{schedule} --steps 2 --validation.every 0")
    assert run_distributed(session, 1, run)[0][1] is None
    sets = str(write_data_sets(tmp_path / "sets"))
    options = ["--tasks", "piqa", "--data_dir", sets, "--limit", "4"]
    assert evaluation.main([str(run.folder), *options]) == 0
    assert "piqa" in capsys.readouterr().out
