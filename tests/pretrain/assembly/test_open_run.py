"""What a session decides before there is a model, on all ranks alike."""

import os
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pretrain.assembly import open_run
from pretrain.run import decisions
from tests.helpers.distributed import run_distributed
from tests.helpers.training import build, fit, nano_run
from tests.helpers.training import session as train_session


def planned(run, memories):
    """This rank's batch plan where every rank's device has its own memory."""
    with mock.patch.object(decisions, "device_memory", lambda device, ranks: memories[dist.get_rank()]):
        return build(run, 1).batch


def test_the_smallest_device_decides_for_all_ranks(small_folder, tmp_path):
    run = replace(nano_run(small_folder, tmp_path), micro_batch=None, global_batch_tokens=64 * 64)
    much, little = 64 << 30, 4 << 20
    rich = run_distributed(planned, 2, run, [much, much])
    poor = run_distributed(planned, 2, run, [little, little])
    mixed = run_distributed(planned, 2, run, [much, little])
    assert rich[0] == rich[1] and poor[0] == poor[1] and rich[0].micro_batch > poor[0].micro_batch
    assert mixed == poor


def seconds_after_a_slow_start(run):
    original = open_run.build_network

    def build_network(*given, **kernels):
        time.sleep(3)
        return original(*given, **kernels)

    with mock.patch.object(open_run, "build_network", build_network):
        return build(run, 1).trainer.metrics.throughput.seconds


def test_building_and_loading_are_no_training_time(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path)
    assert run_distributed(seconds_after_a_slow_start, 1, run)[0] < 2


@pytest.mark.slow
def test_the_thread_count_of_a_run_is_that_of_its_checkpoint(small_folder, tmp_path):
    """Through the session, as a user resumes: saved with 2 threads, continued where 1 would be the machine's
    share."""
    run = nano_run(small_folder, tmp_path, "--steps 1 --validation.every 0 --threads 2")
    assert run_distributed(saved_and_resumed, 1, run, timeout=120) == [(2, 2)]


def saved_and_resumed(run):
    before = torch.get_num_threads()
    try:
        fit(build(run, 1))
        with mock.patch.dict(os.environ), mock.patch("pretrain.runtime.world.available_cores", lambda: 1):
            os.environ.pop("OMP_NUM_THREADS", None)
            resumed = build(replace(run, threads=None, steps=2), 1)
        return torch.get_num_threads(), resumed.state.world.threads
    finally:
        torch.set_num_threads(before)


def watched(run):
    """Whether the watchdog runs before and after the training."""
    opened = build(run, 1)
    thread = opened.trainer.control.watchdog._thread
    before = thread.is_alive()
    fit(opened)
    return before, thread.is_alive()


def test_the_watchdog_stops_with_the_training(small_folder, tmp_path):
    """The closing lines may take longer than it waits, and must not fail the run."""
    run = nano_run(small_folder, tmp_path, "--steps 1 --validation.every 0")
    assert run_distributed(watched, 1, run, timeout=120) == [(True, False)]


def compile_of(run, threshold=None):
    """Whether the session would compile, and why."""
    with mock.patch.object(decisions, "CPU_FLOPS", threshold or decisions.CPU_FLOPS):
        session = build(run, 1)
    assert session.run == run and session.state.run == run.to_dict(), "the request is not rewritten"
    return session.decisions.compile.value, session.state.decided.compile, session.decisions.compile.reason


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
