"""What a session decides before there is a model, on all ranks alike."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from model.errors import UserError
from pretrain import session as sessions
from pretrain.checkpoint.state import TrainingState
from pretrain.config.run_config import RunConfig
from pretrain.engine import compiling
from pretrain.engine.patches import prepare_deepspeed
from pretrain.runtime.world import start_world
from tests.helpers.distributed import run_distributed
from tests.helpers.training import alone, build, fit, nano_run
from tests.helpers.training import session as train_session


def planned(run, memories, micro_batches=None):
    """This rank's batch plan where every rank's device has its own memory; or the line that ends it."""
    if micro_batches:
        run = replace(run, micro_batch=micro_batches[dist.get_rank()])
    with mock.patch.object(sessions, "device_memory", lambda device, ranks: memories[dist.get_rank()]):
        try:
            return build(run, 1).batch
        except UserError as error:
            return str(error)


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


def resumed_threads(saved_world, ranks, asked, variable):
    """Threads that a run resumed on this machine of 4 cores computes on, and that it records."""
    before = torch.get_num_threads()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": str(variable)} if variable else {}
    world = replace(alone(), size=ranks, threads=4)
    try:
        torch.set_num_threads(4)
        with mock.patch.dict(os.environ, environment, clear=True):
            kept = sessions._keep_threads(world, RunConfig(threads=asked), TrainingState(world=saved_world))
        return torch.get_num_threads(), kept.threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("saved", "ranks", "asked", "variable", "expected"),
    [
        ({"ranks": 1, "threads": 3}, 1, None, None, 3),
        ({"ranks": 1, "threads": 3}, 2, None, None, 4),  # other ranks, other bits: the cores are shared anew
        ({"ranks": 1, "threads": 3}, 1, 4, None, 4),
        ({"ranks": 1, "threads": 3}, 1, None, 4, 4),
        ({}, 1, None, None, 4),
    ],
)
def test_the_thread_count_is_kept_unless_asked_for(saved, ranks, asked, variable, expected):
    assert resumed_threads(saved, ranks, asked, variable) == (expected, expected)


def test_the_thread_count_of_a_run_is_that_of_its_checkpoint(small_folder, tmp_path):
    """Through the session, as a user resumes: saved with 2 threads, continued where 1 would be the machine's
    share."""
    run = nano_run(small_folder, tmp_path, "--steps 1 --validation.every 0 --threads 2")
    assert run_distributed(saved_and_resumed, 1, run, timeout=120) == [(2, 2)]


def saved_and_resumed(run):
    before = torch.get_num_threads()
    prepare_deepspeed()
    try:
        fit(build(run, 1, start_world(2, False)))
        torch.set_num_threads(1)
        with mock.patch.dict(os.environ):
            os.environ.pop("OMP_NUM_THREADS", None)
            world = replace(start_world(None, False), threads=1)
            torch.set_num_threads(1)
            resumed = build(replace(run, threads=None, steps=2), 1, world)
        return torch.get_num_threads(), resumed.world.threads
    finally:
        torch.set_num_threads(before)


def compile_of(run, threshold=None):
    """Whether the session would compile, and why."""
    with mock.patch.object(compiling, "CPU_FLOPS", threshold or compiling.CPU_FLOPS):
        session = build(run, 1)
    return session.run.compile, session.state.run["compile"], session.compile_reason


def test_what_auto_decided_is_saved_and_kept(small_folder, tmp_path):
    """Though the run has become long enough to be compiled."""
    run = replace(nano_run(small_folder, tmp_path), steps=2)
    run_distributed(train_session, 1, run, 1)
    longer = replace(run, steps=10**6)
    assert run.compile == "auto"
    assert run_distributed(compile_of, 1, longer, 1.0) == [(False, False, "as the run began")]
    new = replace(longer, name="new")
    compiled, saved, reason = run_distributed(compile_of, 1, new, 1.0)[0]
    assert compiled is saved is True and reason.endswith("FLOPs on a CPU")
    assert run_distributed(compile_of, 1, replace(longer, compile=True))[0][0] is True
