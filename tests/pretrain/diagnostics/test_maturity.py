"""Release by maturity: the decision by hand, and in runs that are stopped, continued and resharded."""

import json
from types import SimpleNamespace

import pytest

from model.errors import UserError
from model.presets import preset
from pretrain.checkpoint.state import read_state
from pretrain.config.sections import MaturityConfig
from pretrain.diagnostics.maturity import Maturity, has_settled
from tests.helpers.distributed import run_distributed
from tests.helpers.shapes import newest
from tests.helpers.training import broken_off, curve, interrupted, nano_run, session

CONFIG = MaturityConfig(settled=0.5, patience=2)
SOON = "--maturity.settled 1.0 --maturity.patience 1"


@pytest.mark.parametrize(
    ("drifts", "expected"),
    [
        ([], False),
        ([0.1, 0.01], False),  # two drifts cannot both be half of one before them
        ([1.0, 0.5, 0.5], True),
        ([1.0, 0.5, 0.6], False),
        ([1.0, 0.4, 0.6, 0.5], False),  # not twice in a row
        ([0.2, 0.1, 0.1], True),  # the scale does not matter
        ([0.1, 0.2, 0.4, 0.8, 1.6], False),  # warmup: the newest is the largest
        ([0.1, 0.2, 0.4, 0.2, 0.2], True),
        ([1.0, 0.5, 0.5, 2.0], False),
    ],
)
def test_settled_by_hand(drifts, expected):
    assert has_settled(drifts, CONFIG) is expected


def test_patience_and_share():
    assert has_settled([1.0, 0.5], MaturityConfig(patience=1))
    assert not has_settled([1.0, 0.5, 0.5], MaturityConfig(patience=3))
    assert not has_settled([1.0, 0.5, 0.5], MaturityConfig(settled=0.4))
    # A drift is compared with one before it.
    assert not has_settled([1.0], MaturityConfig(settled=1.0, patience=1))
    assert has_settled([1.0, 1.0], MaturityConfig(settled=1.0, patience=1))


def test_the_probe_is_above_the_lower_half():
    run, rates = SimpleNamespace(maturity=MaturityConfig(), steps=16), SimpleNamespace(rules={})
    models = [preset("prism-nano").replace(heads=(4,) * layers) for layers in (2, 4, 5)]
    sessions = [SimpleNamespace(run=run, rates=rates, world=None, model_config=model) for model in models]
    assert [Maturity(session).layer for session in sessions] == [0, 1, 2]


def maturity_run(small_folder, folder, name, more="", **changes):
    """16 steps, probes at every second, released at 10 at the latest."""
    rule = {"name": "slow", "parameters": ["q", "k"], "layers": "upper_half", "scale": 0.25, "ramp": 2}
    rules = json.dumps([rule | {"release": "maturity", "latest": 10, **changes}])
    flags = f"""--name {name} --steps 16 --maturity.every 2 --maturity.sequences 3 --schedule.warmup 2
        --optimizer.learning_rate 1e-2 --validation.every 0 --diagnostics_every 0 {more}"""
    return nano_run(small_folder, folder, *flags.split(), "--lr_rules", rules)


def rates(run):
    """Factor of the rule at each step."""
    return [row["lr/slow/decay"] / row["lr/base/decay"] for row in curve(run.folder)]


@pytest.mark.slow
def test_forced_at_the_latest_step(small_folder, tmp_path):
    """A share that no drift can reach."""
    run = maturity_run(small_folder, tmp_path, "forced", "--maturity.settled 1e-9")
    assert run_distributed(session, 1, run, timeout=120)[0] == ([], None)
    assert rates(run) == pytest.approx([0.25] * 10 + [0.625] + [1] * 5)
    state = read_state(newest(run.folder))
    assert state.released == {"slow": 10}
    assert [step for step, _ in state.record("maturity")["probes"]] == [2, 4, 6, 8, 10]
    found = {row["step"]: row["maturity/drift"] for row in curve(run.folder) if "maturity/drift" in row}
    # The drift that is known before a step stands in that step's row.
    assert found == {step + 1: drift for step, drift in state.record("maturity")["probes"]}


def test_fires_when_settled_and_not_before_the_hold(small_folder, tmp_path):
    """A share of 1 is reached by the first two drifts that are not larger than the largest."""
    run = maturity_run(small_folder, tmp_path, "fires", SOON)
    run_distributed(session, 1, run, timeout=120)
    state = read_state(newest(run.folder))
    probes = state.record("maturity")["probes"]
    fired = next(
        step
        for i, (step, _) in enumerate(probes)
        if has_settled([d for _, d in probes[: i + 1]], run.maturity)
    )
    assert state.released == {"slow": fired} and fired < 10 and probes[-1][0] == fired
    assert rates(run) == pytest.approx([0.25] * fired + [0.625] + [1] * (15 - fired))
    held = maturity_run(small_folder, tmp_path, "held", SOON, hold=fired + 3)
    run_distributed(session, 1, held, timeout=120)
    assert read_state(newest(held.folder)).released == {"slow": fired + 4}  # the first probe after the hold


@pytest.mark.slow
@pytest.mark.parametrize(("settled_share", "stop"), [("1e-9", 5), ("1.0", 8)])
def test_a_break_changes_nothing(small_folder, tmp_path, settled_share, stop):
    """Stopped between probes and at one: the features of the last probe are in the checkpoint."""
    more = f"--maturity.settled {settled_share} --maturity.patience 1 --checkpoint.every {stop}"
    whole = maturity_run(small_folder, tmp_path, "whole", more)
    broken = broken_off(whole, stop + 1, ranks=2)
    one, other = read_state(newest(whole.folder)), read_state(newest(broken.folder))
    assert one.record("maturity") == other.record("maturity") and one.released == other.released


@pytest.mark.slow
def test_every_shape_decides_alike(small_folder, tmp_path):
    """And so does a run that is continued in another shape."""
    ranks, stage, tensor_parallel = 2, 2, 2
    more = f"{SOON} --checkpoint.every 3"
    alone = maturity_run(small_folder, tmp_path, "alone", more)
    run_distributed(session, 1, alone, timeout=120)
    shaped = maturity_run(small_folder, tmp_path, "shaped", f"{more} --tensor_parallel {tensor_parallel}")
    run_distributed(interrupted, ranks, shaped, 4, ranks, stage, timeout=120)
    assert newest(shaped.folder).name == "step_000003"
    run_distributed(session, ranks, shaped, stage, timeout=120)
    one, other = read_state(newest(alone.folder)), read_state(newest(shaped.folder))
    assert one.released == other.released
    for probe, same in zip(one.record("maturity")["probes"], other.record("maturity")["probes"], strict=True):
        assert probe == pytest.approx(same, rel=1e-3)


def test_bad_settings(small_folder, tmp_path):
    with pytest.raises(UserError, match=r"maturity\.settled: 1\.5 is not valid; give at most 1"):
        maturity_run(small_folder, tmp_path, "bad", "--maturity.settled 1.5")
    with pytest.raises(UserError, match=r"maturity\.every: 2\.5 is neither a fraction below 1 nor a whole"):
        maturity_run(small_folder, tmp_path, "bad", "--maturity.every 2.5")
