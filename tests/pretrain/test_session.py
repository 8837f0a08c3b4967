"""What a session decides before there is a model, on all ranks alike."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from model.errors import UserError
from pretrain import session as sessions
from pretrain.engine.patches import prepare_deepspeed
from pretrain.run.data import open_data
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run

DS_CONFIG = {"zero_optimization": {"stage": 1}}


def planned(run, memories, micro_batches=None):
    """This rank's batch plan where every rank's device has its own memory; or the line that ends it."""
    prepare_deepspeed()
    world = start_world(1, False)
    real = sessions.device_memory
    monkeypatched: Any = lambda device, ranks: memories[dist.get_rank()]  # noqa: E731
    sessions.device_memory = monkeypatched
    if micro_batches:
        run = replace(run, micro_batch=micro_batches[dist.get_rank()])
    try:
        return sessions.build_session(run, dict(DS_CONFIG), open_data(run, lambda line: None), world).batch
    except UserError as error:
        return str(error)
    finally:
        sessions.device_memory = real


def test_the_smallest_device_decides_for_all_ranks(small_folder, tmp_path):
    run = replace(nano_run(small_folder, tmp_path), micro_batch=None, global_batch_tokens=64 * 64)
    much, little = 64 << 30, 4 << 20
    rich = run_distributed(planned, 2, run, [much, much])
    poor = run_distributed(planned, 2, run, [little, little])
    mixed = run_distributed(planned, 2, run, [much, little])
    assert rich[0] == rich[1] and poor[0] == poor[1] and rich[0].micro_batch > poor[0].micro_batch
    assert mixed == poor


def test_ranks_that_plan_differently_are_refused(small_folder, tmp_path):
    """For instance on nodes whose configurations differ."""
    found = run_distributed(planned, 2, nano_run(small_folder, tmp_path), [1 << 34] * 2, [2, 4])
    assert found[0] == found[1] and found[0].startswith("micro_batch: rank 0 would take 2 ")
    assert "rank 1 4" in found[0]
