"""What all ranks learn at the same place."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from pretrain.runtime import control as control_module
from pretrain.runtime.control import Control
from pretrain.runtime.signals import STOPPED, Stopped
from tests.helpers.distributed import run_distributed
from tests.helpers.training import alone


def world():
    from pretrain.engine.patches import prepare_deepspeed
    from pretrain.runtime.world import start_world

    prepare_deepspeed()
    return start_world(None, False)


def votes(stops):
    control = Control(world(), Asked(stops if dist.get_rank() == 1 else 1000))
    read = []
    for step in range(4):
        control.start_vote(step, writing=dist.get_rank() == 2)
        stop, writing = control.vote_result()
        read.append((stop.exit_code if stop else 0, writing))
    return read


def test_all_ranks_read_the_same_vote():
    assert run_distributed(votes, 1, 2) == [[(0, False)] * 4]
    read = [(0, True), (0, True), (STOPPED, True)]
    assert [found[:3] for found in run_distributed(votes, 3, 2)] == [read] * 3


class Asked:
    """A listener that was asked after some questions."""

    exit_code = STOPPED

    def __init__(self, after):
        self.after, self.has_agreed = after, False

    @property
    def reason(self):
        self.after -= 1
        return "SIGUSR1" if self.after < 0 else None

    def mark_agreed(self):
        self.has_agreed = True


def passes(asked):
    listener = Asked(asked if dist.get_rank() == 1 else 1000)
    control = Control(world(), listener)
    engine = torch.nn.Linear(2, 2)
    done = 0
    try:
        with control.allow_interruption(engine, "validating"):
            for _ in range(10):
                engine(torch.zeros(2))
                done += 1
    except Stopped as stopped:
        return done, listener.has_agreed, stopped.reason, len(engine._forward_hooks)
    return done


def test_evaluation_ends_on_all_ranks_after_the_same_pass():
    assert run_distributed(passes, 3, 4) == [(4, True, "rank 1: SIGUSR1", 0)] * 3
    assert run_distributed(passes, 2, 100) == [10, 10]


def stopped_at(vote_ranks, asked):
    """The turns at which ranks learn of a request, and those at which they voted."""
    with mock.patch.object(control_module, "VOTE_RANKS", vote_ranks):  # these workers serve other tests, too
        control = Control(world(), Asked(asked if dist.get_rank() == 1 else 1000))
    voted = []
    for turn in range(6, 20):
        control.start_vote(turn, writing=False)
        voted += [turn] if control._ballot is not None else []
        stop, writing = control.vote_result()
        assert writing == (turn not in voted), "not known at a turn without a vote"
        if stop:
            return turn, voted
    return None


def test_many_ranks_vote_at_some_turns():
    """Rank 1 is asked after its second vote."""
    assert run_distributed(stopped_at, 3, 64, 2) == [(8, [6, 7, 8])] * 3
    assert run_distributed(stopped_at, 3, 1, 2) == [(12, [6, 9, 12])] * 3


def test_one_rank_needs_nobody():
    control = Control(alone(), Asked(1))
    answers = []
    for writing in (False, True):
        control.start_vote(len(answers), writing)
        answers.append(control.vote_result())
    (go_on, idle), (stop, writing) = answers
    assert (go_on, idle, stop and stop.exit_code, writing) == (None, False, STOPPED, True)
