"""The layout of the grid, that it is an argument and nothing else, and that t = 1 is free of it."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from model.errors import UserError
from model.initialization import initialize
from model.parallel_plan import check_world
from model.presets import preset
from model.process_grid import ALONE, start_grid
from model.transformer import Transformer
from tests.helpers.distributed import ROOT, run_distributed


def layout(tensor_parallel, **options):
    here = start_grid(tensor_parallel, **options)
    members = {size: dist.get_process_group_ranks(group) for size, group in here.head_groups.items() if group}
    return {
        "tensor": (here.tensor_parallel, here.tensor_rank, dist.get_process_group_ranks(here.tensor_group)),
        "data": (here.data_parallel, here.data_rank, dist.get_process_group_ranks(here.data_group)),
        "heads": members,
        "sequence": here.sequence_parallel,
        "groups": len(dist.distributed_c10d._world.pg_map) - 1,
    }


def test_tensor_ranks_are_neighbours():
    for rank, found in enumerate(run_distributed(layout, 4, 2)):
        first = rank // 2 * 2
        assert found == {
            "tensor": (2, rank % 2, [first, first + 1]),
            "data": (2, rank // 2, [rank % 2, rank % 2 + 2]),
            "heads": {2: [first, first + 1]},
            "sequence": False,
            "groups": 2,
        }


def test_head_groups_of_every_divisor():
    for rank, found in enumerate(run_distributed(layout, 4, 4, sequence_parallel=True)):
        first = rank // 2 * 2
        assert found["tensor"] == (4, rank, [0, 1, 2, 3]) and found["data"] == (1, 0, [rank])
        assert found["heads"] == {2: [first, first + 1], 4: [0, 1, 2, 3]} and found["sequence"]


def several_grids():
    """A model on each of four grids, all alive at once, and one without a grid; the tensor size of each
    part."""
    tokens = torch.arange(16).view(4, 4)
    grids = [start_grid(2), start_grid(4), start_grid(2, sequence_parallel=True), start_grid(1)]
    models = [Transformer(preset("prism-nano"), grid).double() for grid in grids]
    models.append(Transformer(preset("prism-nano")).double())
    for model in models:
        initialize(model, 0)
    with torch.no_grad():  # the first again at last: the grids between took nothing from it
        losses = [model(tokens, tokens).item() for model in [*models, models[0]]]
    sizes = [model.layers[0].ffn.up.weight.shape[0] for model in models]
    return sizes, losses, [grid is ALONE for grid in grids]


def test_grids_live_side_by_side_and_a_model_without_one_is_whole():
    for sizes, losses, alone in run_distributed(several_grids, 4):
        assert sizes == [64, 32, 64, 128, 128] and alone == [False, False, False, True]
        assert losses == pytest.approx([losses[-2]] * 6, rel=1e-12)


def refused(tensor_parallel):
    with pytest.raises(UserError) as caught:
        start_grid(tensor_parallel)
    return str(caught.value), len(dist.distributed_c10d._world.pg_map)


def test_a_degree_that_does_not_divide_the_world_is_refused_on_every_rank():
    message = "tensor_parallel: 3 does not divide the 4 ranks of this run; valid values are 1, 2, 4"
    assert run_distributed(refused, 4, 3) == [(message, 1)] * 4  # and no group was made
    with pytest.raises(UserError, match="tensor_parallel: 0 does not divide the 1 rank of this run"):
        check_world(1, 0)


@pytest.mark.slow
def test_without_tensor_parallelism_megatron_is_not_imported():
    program = (
        "import sys, torch; from model.presets import preset; from model.transformer import Transformer; "
        "from model.initialization import initialize; from model.process_grid import start_grid; "
        "model = Transformer(preset('prism-nano'), start_grid(1)); initialize(model, 0); "
        "tokens = torch.zeros(1, 8, dtype=torch.long); model(tokens, tokens).backward(); "
        "assert not [name for name in sys.modules if name.startswith('megatron')]; "
        "assert type(model.layers[0].attention.q) is torch.nn.Linear"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


COUNT_GROUPS = """
import sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from model.parallel_plan import head_group_sizes
from model.presets import preset
from model.process_grid import start_grid
make, made = dist.new_group, []
def counted(ranks, **options):
    made.append(ranks)
    return make(ranks, **options)
dist.new_group = counted
for case in sys.argv[1:]:
    degree, name = case.split(":")
    sizes = None if name == "any" else head_group_sizes(preset(name), int(degree))
    for rank in (0, 77, 511):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
        made.clear()
        start_grid(int(degree), head_group_sizes=sizes)
        print(len(made), sorted(len(ranks) for ranks in made if rank in ranks))
        dist.destroy_process_group()
"""


GROUPS = {
    "8:any": (64 + 256 + 128 + 8, [2, 4, 8, 64]),
    "8:uniform-124m": (64 + 256 + 8, [2, 8, 64]),  # 12 heads, which pairs of ranks share
    "8:uniform-354m": (64 + 8, [8, 64]),  # 16 heads
    "1:any": (0, []),
}


@pytest.mark.slow
def test_the_groups_of_512_ranks():
    """Ranks that exist in name alone: docs/cluster.md has the counts."""
    command = [sys.executable, "-c", COUNT_GROUPS, *GROUPS]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "".join(f"{calls} {sizes}\n" * 3 for calls, sizes in GROUPS.values())
