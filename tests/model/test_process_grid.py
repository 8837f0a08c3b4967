"""The layout of the grid, what DeepSpeed is told of it, and that t = 1 is free of it."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from model.errors import UserError
from model.process_grid import ALONE, check_world, deepspeed_mpu, grid, start_grid
from tests.helpers.distributed import ROOT, run_distributed


def layout(tensor_parallel, **options):
    here = start_grid(tensor_parallel, **options)
    again = start_grid(tensor_parallel, **options)
    members = {size: dist.get_process_group_ranks(group) for size, group in here.head_groups.items() if group}
    return {
        "same": again is here and grid() is here,
        "tensor": (here.tensor_parallel, here.tensor_rank, dist.get_process_group_ranks(here.tensor_group)),
        "data": (here.data_parallel, here.data_rank, dist.get_process_group_ranks(here.data_group)),
        "heads": members,
        "sequence": here.sequence_parallel,
    }


def test_tensor_ranks_are_neighbours():
    for rank, found in enumerate(run_distributed(layout, 4, 2)):
        first = rank // 2 * 2
        assert found == {
            "same": True,
            "tensor": (2, rank % 2, [first, first + 1]),
            "data": (2, rank // 2, [rank % 2, rank % 2 + 2]),
            "heads": {2: [first, first + 1]},
            "sequence": False,
        }


def test_head_groups_of_every_divisor():
    for rank, found in enumerate(run_distributed(layout, 4, 4, sequence_parallel=True)):
        first = rank // 2 * 2
        assert found["tensor"] == (4, rank, [0, 1, 2, 3]) and found["data"] == (1, 0, [rank])
        assert found["heads"] == {2: [first, first + 1], 4: [0, 1, 2, 3]} and found["sequence"]


def changes():
    degrees = []
    for tensor_parallel in (2, 4, 1):
        start_grid(tensor_parallel)
        degrees.append((grid().tensor_parallel, grid().data_parallel))
    return degrees, deepspeed_mpu() is None


def test_a_grid_can_be_replaced():
    assert run_distributed(changes, 4) == [([(2, 2), (4, 1), (1, 1)], True)] * 4


def mpu_answers():
    start_grid(2)
    mpu = deepspeed_mpu()
    assert not hasattr(mpu, "initialize_sequence_parallel")  # DeepSpeed would take it for Ulysses
    for kind in ("model_parallel", "tensor_model_parallel", "data_parallel"):
        rank, size, group = (getattr(mpu, f"get_{kind}_{what}")() for what in ("rank", "world_size", "group"))
        assert (rank, size) == (dist.get_rank(group), dist.get_world_size(group))
    assert mpu.get_data_parallel_group_ranks() == dist.get_process_group_ranks(mpu.get_data_parallel_group())
    return mpu.get_tensor_model_parallel_src_rank()


def test_what_deepspeed_asks_for():
    assert run_distributed(mpu_answers, 4) == [0, 0, 2, 2]


def refused(tensor_parallel):
    with pytest.raises(UserError) as caught:
        start_grid(tensor_parallel)
    return str(caught.value), "megatron.core" in sys.modules and grid() is not ALONE


def test_a_degree_that_does_not_divide_the_world_is_refused_on_every_rank():
    message = "tensor_parallel: 3 does not divide the 4 ranks of this run; valid values are 1, 2, 4"
    assert run_distributed(refused, 4, 3) == [(message, False)] * 4
    with pytest.raises(UserError, match="tensor_parallel: 0 does not divide the 1 rank of this run"):
        check_world(1, 0)


def test_without_tensor_parallelism_megatron_is_not_imported():
    program = (
        "import sys, torch; from model.presets import preset; from model.transformer import Transformer; "
        "from model.initialization import initialize; from model.process_grid import start_grid; start_grid(1); "
        "model = Transformer(preset('prism-nano')); initialize(model, 0); "
        "tokens = torch.zeros(1, 8, dtype=torch.long); model(tokens, tokens).backward(); "
        "assert not [name for name in sys.modules if name.startswith('megatron')]; "
        "assert type(model.layers[0].attention.q) is torch.nn.Linear"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
