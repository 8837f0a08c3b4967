"""The learning rate against values computed by hand."""

import math

import pytest

from model.errors import UserError
from pretrain.config.lr_rules import parse_rules
from pretrain.config.run_config import ScheduleConfig
from pretrain.optim.schedule import LearningRateSchedule, RuleSchedule, length_in_steps, phase_in_steps


def test_cosine_by_hand():
    schedule = LearningRateSchedule(ScheduleConfig(kind="cosine", warmup=4, minimum=0.1), steps=12)
    assert [schedule.factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    # Half-way through the 8 steps of the cosine: (1 + 0.1) / 2.
    assert schedule.factor(7) == pytest.approx(0.55)
    assert schedule.factor(4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2)
    assert schedule.factor(11) == pytest.approx(0.1)


def test_warmup_stable_decay_by_hand():
    schedule = LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=2, decay=4, minimum=0.2), steps=10)
    expected = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert [schedule.factor(s) for s in range(10)] == pytest.approx(expected)


def test_linear_by_hand():
    schedule = LearningRateSchedule(ScheduleConfig(kind="linear", warmup=2, minimum=0.2), steps=10)
    expected = [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    assert [schedule.factor(s) for s in range(10)] == pytest.approx(expected)
    without = LearningRateSchedule(ScheduleConfig(kind="linear", warmup=0, minimum=0), steps=4)
    assert [without.factor(s) for s in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0])


def test_no_warmup_starts_below_the_peak_by_one_step_of_the_cosine():
    schedule = LearningRateSchedule(ScheduleConfig(warmup=0, minimum=0), steps=2)
    assert [schedule.factor(s) for s in range(2)] == pytest.approx([0.5, 0.0])


def test_fraction_or_steps():
    assert length_in_steps("x", 0.025, 11000) == 275
    assert length_in_steps("x", 1, 11000) == 1
    with pytest.raises(UserError, match=r"schedule\.warmup: 2\.5"):
        LearningRateSchedule(ScheduleConfig(warmup=2.5), steps=10)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScheduleConfig(warmup=11), "schedule.warmup: 11 steps is longer than the run of 10"),
        (ScheduleConfig(kind="wsd", warmup=6, decay=6), "give at most 4"),
    ],
)
def test_lengths_beyond_the_run(config, message):
    with pytest.raises(UserError, match=message):
        LearningRateSchedule(config, steps=10)


@pytest.mark.parametrize("one", [1, 1.0])
@pytest.mark.parametrize("steps", [2, 7, 1000, 11000, 123457])
def test_exactly_one_may_mean_either(one, steps):
    """What the line offers means what it says."""
    with pytest.raises(
        UserError, match=r"schedule\.decay: .* one step or the whole run; write (\S+) .*"
    ) as caught:
        LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=0, decay=one), steps)
    words = str(caught.value).split()
    assert phase_in_steps("x", float(words[words.index("write") + 1]), steps) == 1
    assert phase_in_steps("x", float(words[-5]), steps) == steps
    for fields in ({"hold": one}, {"release": "maturity", "latest": one}):
        (rule,) = parse_rules([{"name": "slow", "parameters": ["q"], "scale": 0.5, **fields}])
        with pytest.raises(
            UserError, match=r"lr_rules\.slow\.(hold|latest): .* may mean one step or the whole run"
        ):
            RuleSchedule(rule, steps)


def test_one_is_clear_where_the_whole_run_makes_no_sense():
    assert LearningRateSchedule(ScheduleConfig(warmup=1), steps=10).warmup == 1
    assert LearningRateSchedule(ScheduleConfig(kind="wsd", warmup=0, decay=1), steps=1).decay == 1
