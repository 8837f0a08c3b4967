"""Which rank is slow, and by how much."""

import math
import time

import pytest
import torch

from pretrain.engine.patches import prepare_deepspeed
from pretrain.metrics.metrics import ForwardClock, rank_values
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed
from tests.helpers.training import alone


def passes(slow):
    prepare_deepspeed()
    world = start_world(1, False)
    clock = ForwardClock(world.device)
    for _ in range(3):
        with clock.measure():
            time.sleep(0.1 if world.rank == slow else 0.02)
        time.sleep(0.05)  # what is between passes does not count
    return rank_values(clock, world, {"tokens_per_second": 300.0})


def test_the_slowest_rank_is_named():
    found, same = run_distributed(passes, 2, 1, timeout=120)
    assert found == same and found["ranks/slowest"] == 1 and found["ranks/tokens_per_second"] == 150
    assert found["ranks/forward_seconds_slowest"] == pytest.approx(0.1, abs=0.03)
    assert found["ranks/forward_seconds"] == pytest.approx(0.06, abs=0.03)


def test_a_rank_alone_has_no_such_figures_and_a_reading_begins_anew():
    clock = ForwardClock(torch.device("cpu"))
    assert rank_values(clock, alone(), {"tokens_per_second": 1.0}) == {} and math.isnan(clock.read())
    with clock.measure():
        time.sleep(0.01)
    assert 0.01 <= clock.read() < 1 and math.isnan(clock.read())
