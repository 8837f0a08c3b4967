"""Work that one rank does for all, and values of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from model.errors import UserError
from pretrain.engine.patches import prepare_deepspeed
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed


def once_on_all_ranks():
    prepare_deepspeed()
    world, calls = start_world(1, False), []

    def make() -> list[int]:
        calls.append(dist.get_rank())
        return [1, 2, 3]

    def refuse() -> None:
        raise UserError("data: no")

    value = world.on_rank_zero(make)
    try:
        world.on_rank_zero(refuse)
    except UserError as error:
        return calls, value, str(error)
    return None


def test_rank_0_works_for_all_and_its_refusal_is_everybodys():
    answer = ([1, 2, 3], "data: no")
    assert run_distributed(once_on_all_ranks, 2) == [([0], *answer), ([], *answer)]
    assert run_distributed(once_on_all_ranks, 1) == [([0], *answer)]


def largest_of_all_ranks():
    prepare_deepspeed()
    world = start_world(1, False)
    return world.max(torch.tensor([world.rank, -world.rank])).tolist()


def test_the_largest_values_of_all_ranks():
    assert run_distributed(largest_of_all_ranks, 2) == [[1, 0], [1, 0]]
