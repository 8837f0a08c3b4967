"""The learning rate against values computed by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from pretrain.config.lr_rules import parse_rules
from pretrain.config.sections import ScheduleConfig, length_in_steps, phase_in_steps
from pretrain.optim.schedule import LearningRateSchedule, RuleSchedule


def test_cosine_by_hand():
    schedule = LearningRateSchedule(ScheduleConfig(kind="cosine", warmup=4, minimum=0.1), steps=12)
    assert [schedule.factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    # Half-way through the 8 steps of the cosine: (1 + 0.1) / 2.
    assert schedule.factor(7) == pytest.approx(0.55)
    assert schedule.factor(4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2)
    assert schedule.factor(11) == pytest.approx(0.1)


BY_HAND = [
    ({"kind": "wsd", "warmup": 2, "decay": 4, "minimum": 0.2}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    ({"kind": "linear", "warmup": 2, "minimum": 0.2}, [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
    ({"kind": "linear", "warmup": 0, "minimum": 0}, [0.75, 0.5, 0.25, 0]),
    # A tenth of two steps is less than one.
    ({"kind": "wsd", "warmup": 0, "decay": 0.1, "minimum": 0.2}, [1, 0.2]),
    # Without a warmup it starts below the peak by one step of the cosine.
    ({"warmup": 0, "minimum": 0}, [0.5, 0.0]),
]


@pytest.mark.parametrize(("config", "expected"), BY_HAND)
def test_factors_by_hand(config, expected):
    schedule = LearningRateSchedule(ScheduleConfig(**config), steps=len(expected))
    assert [schedule.factor(step) for step in range(len(expected))] == pytest.approx(expected)


SHARE = st.floats(0, 0.4)


@given(st.sampled_from(["cosine", "linear", "wsd"]), st.integers(2, 300), SHARE, SHARE, st.floats(0, 1))
@settings(derandomize=True, database=None, max_examples=60, deadline=None)
def test_every_schedule_rises_once_and_falls_to_its_minimum(kind, steps, warmup, decay, minimum):
    length = round(warmup * steps)
    config = ScheduleConfig(kind=kind, warmup=length, decay=max(2, round(decay * steps)), minimum=minimum)
    if length + config.decay > steps:
        return
    factors = [LearningRateSchedule(config, steps).factor(step) for step in range(steps)]
    rise, fall = factors[:length], factors[length:]
    assert rise == sorted(rise) and fall == sorted(fall, reverse=True)
    assert 0 <= min(factors) <= max(factors) <= 1
    assert factors[-1] == pytest.approx(minimum) and (not rise or rise[-1] == pytest.approx(1))


def test_fraction_or_steps():
    assert length_in_steps("x", 0.025, 11000) == 275
    assert length_in_steps("x", 1, 11000) == 1
    with pytest.raises(UserError, match=r"schedule\.warmup: 2\.5"):
        LearningRateSchedule(ScheduleConfig(warmup=2.5), steps=10)


def test_lengths_beyond_the_run():
    with pytest.raises(UserError, match=r"schedule\.warmup: 11 steps is longer than the run of 10"):
        LearningRateSchedule(ScheduleConfig(warmup=11), steps=10)
    with pytest.raises(UserError, match="give at most 4"):
        LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=6, decay=6), steps=10)
    with pytest.raises(UserError, match=r"give at most 0\.1, one step$"):
        LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=9, decay=6), steps=10)
    LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=9, decay=0.1), steps=10)


@pytest.mark.parametrize("one", [1, 1.0])
@pytest.mark.parametrize("steps", [2, 7, 1000, 11000, 123457])
def test_exactly_one_may_mean_either(one, steps):
    """What the line offers means what it says."""
    either = r"schedule\.decay: .* one step or the whole run; write (\S+) .*"
    with pytest.raises(UserError, match=either) as caught:
        LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=0, decay=one), steps)
    words = str(caught.value).split()
    assert phase_in_steps("x", float(words[words.index("write") + 1]), steps) == 1
    assert phase_in_steps("x", float(words[-5]), steps) == steps
    for fields in ({"hold": one}, {"release": "maturity", "latest": one}):
        (rule,) = parse_rules([{"name": "slow", "parameters": ["q"], "scale": 0.5, **fields}])
        either = r"lr_rules\.slow\.(hold|latest): .* may mean one step or the whole run"
        with pytest.raises(UserError, match=either):
            RuleSchedule(rule, steps)


def test_one_is_clear_where_the_whole_run_makes_no_sense():
    assert LearningRateSchedule(ScheduleConfig(warmup=1), steps=10).warmup == 1
    assert LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=0, decay=1), steps=1).decay == 1
