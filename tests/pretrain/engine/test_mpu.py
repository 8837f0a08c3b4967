"""What DeepSpeed is told of the grid."""

import torch.distributed as dist

from model.process_grid import ALONE, start_grid
from pretrain.engine.build import deepspeed_mpu
from tests.helpers.distributed import run_distributed


def mpu_answers():
    mpu = deepspeed_mpu(start_grid(2))
    assert not hasattr(mpu, "initialize_sequence_parallel")  # DeepSpeed would take it for Ulysses
    for kind in ("model_parallel", "tensor_model_parallel", "data_parallel"):
        rank, size, group = (getattr(mpu, f"get_{kind}_{what}")() for what in ("rank", "world_size", "group"))
        assert (rank, size) == (dist.get_rank(group), dist.get_world_size(group))
    assert mpu.get_data_parallel_group_ranks() == dist.get_process_group_ranks(mpu.get_data_parallel_group())
    return mpu.get_tensor_model_parallel_src_rank()


def test_what_deepspeed_asks_for():
    assert run_distributed(mpu_answers, 4) == [0, 0, 2, 2]


def test_whole_models_need_none():
    assert deepspeed_mpu(ALONE) is None
