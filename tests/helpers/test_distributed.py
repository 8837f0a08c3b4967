"""The helper for multi-process tests: results, reuse, isolation, and every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import distributed
from tests.helpers.distributed import DistributedError, run_distributed


def sum_over_ranks(value: int, *, factor: int = 1) -> tuple[int, int, int]:
    total = torch.tensor([(value + dist.get_rank()) * factor])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def process_and_random_state() -> tuple[int, float, int]:
    torch.set_default_dtype(torch.float64)  # not seen by the next call
    return os.getpid(), torch.rand(1).item(), torch.get_num_threads()


def environment() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))


def fail_on(rank: int) -> None:
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("this rank is wrong")
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def test_results_come_in_rank_order() -> None:
    assert run_distributed(sum_over_ranks, 2, 10, factor=2) == [(0, 2, 42), (1, 2, 42)]


def test_workers_are_reused_and_start_every_call_alike() -> None:
    first = run_distributed(process_and_random_state, 2)
    began = time.perf_counter()
    second = run_distributed(process_and_random_state, 2)
    assert time.perf_counter() - began < 1
    assert first == second
    assert all(threads == 1 for _, _, threads in second)
    assert len({pid for pid, _, _ in second}) == 2


def test_failing_rank_shows_its_traceback_and_output() -> None:
    with pytest.raises(DistributedError) as error:
        run_distributed(fail_on, 2, 1)
    text = str(error.value)
    assert text.startswith("rank 1 raised\nTraceback")
    assert 'raise ValueError("this rank is wrong")' in text
    assert "[rank 1] about to fail" in text
    # The next call gets new workers, and they work.
    assert run_distributed(sum_over_ranks, 2, 0)[0] == (0, 2, 1)


def test_death_is_reported_at_once() -> None:
    run_distributed(environment, 2)  # so that the time below does not include the start
    began = time.perf_counter()
    with pytest.raises(DistributedError, match="rank 1 was ended by SIGKILL"):
        run_distributed(kill_on, 2, 1)
    assert time.perf_counter() - began < 10


def test_hung_rank_times_out_and_shows_where() -> None:
    with pytest.raises(DistributedError, match=r"rank 1 did not finish within 0\.5 s") as error:
        run_distributed(hang_on, 2, 1, timeout=0.5)
    assert "in hang_on" in str(error.value)
    assert 2 not in distributed._pools
