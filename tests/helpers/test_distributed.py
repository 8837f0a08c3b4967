"""The helper for multi-process tests: results, reuse, isolation, and every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain.engine.patches import prepare_deepspeed
from tests.helpers import distributed
from tests.helpers.distributed import DistributedError, run_distributed


@dataclass
class Point:
    """A class of a test module, which arguments and results may hold."""

    x: int
    y: int


def sum_over_ranks(value: int, *, factor: int = 1) -> tuple[int, int, int]:
    total = torch.tensor([(value + dist.get_rank()) * factor])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def swap(point: Point) -> Point:
    return Point(point.y + dist.get_rank(), point.x)


def process_and_random_state() -> tuple[int, float, int]:
    torch.set_default_dtype(torch.float64)  # not seen by the next call
    return os.getpid(), torch.rand(1).item(), torch.get_num_threads()


def group_count() -> int:
    dist.new_group([0, 1])
    dist.barrier()  # a rank that went on at once would close a group that the other is still connecting
    return len(dist.distributed_c10d._world.pg_map)


def environment() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))


def fail_on(rank: int) -> None:
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("this rank is wrong")
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("leaving", flush=True)
        os._exit(7)
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def return_something_local() -> Any:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_come_in_rank_order(world_size: int) -> None:
    ranks = run_distributed(sum_over_ranks, world_size, 10, factor=2)
    total = 2 * sum(10 + rank for rank in range(world_size))
    assert ranks == [(rank, world_size, total) for rank in range(world_size)]


def test_classes_of_the_test_module_travel() -> None:
    assert run_distributed(swap, 2, Point(1, 5)) == [Point(5, 1), Point(6, 1)]


def test_workers_are_reused_and_start_every_call_alike() -> None:
    first = run_distributed(process_and_random_state, 2)
    began = time.perf_counter()
    second = run_distributed(process_and_random_state, 2)
    assert time.perf_counter() - began < 1
    assert first == second
    assert all(threads == 1 for _, _, threads in second)
    assert len({pid for pid, _, _ in second}) == 2


def test_groups_do_not_pile_up() -> None:
    assert run_distributed(group_count, 2) == run_distributed(group_count, 2) == [2, 2]


def test_environment_is_that_of_a_launcher() -> None:
    assert run_distributed(environment, 2) == [("0", "0", "2", "127.0.0.1"), ("1", "1", "2", "127.0.0.1")]


def test_failing_rank_shows_its_traceback_and_output() -> None:
    with pytest.raises(DistributedError) as error:
        run_distributed(fail_on, 2, 1)
    text = str(error.value)
    assert text.startswith("rank 1 raised\nTraceback")
    assert 'raise ValueError("this rank is wrong")' in text
    assert "[rank 1] about to fail" in text
    # The next call gets new workers, and they work.
    assert run_distributed(sum_over_ranks, 2, 0)[0] == (0, 2, 1)


@pytest.mark.parametrize(
    ("function", "text"), [(exit_on, "rank 1 exited with status 7"), (kill_on, "rank 1 was ended by SIGKILL")]
)
def test_death_is_reported_at_once(function: Any, text: str) -> None:
    run_distributed(environment, 2)  # so that the time below does not include the start
    began = time.perf_counter()
    with pytest.raises(DistributedError, match=text):
        run_distributed(function, 2, 1)
    assert time.perf_counter() - began < 10


def test_hung_rank_times_out_and_shows_where() -> None:
    with pytest.raises(DistributedError, match=r"rank 1 did not finish within 0\.5 s") as error:
        run_distributed(hang_on, 2, 1, timeout=0.5)
    assert "in hang_on" in str(error.value)
    assert 2 not in distributed._pools


def test_dead_worker_is_replaced() -> None:
    run_distributed(environment, 1)
    pool = distributed._pools[1]
    pool.ranks[0].process.kill()
    pool.ranks[0].process.join()
    assert run_distributed(sum_over_ranks, 1, 3) == [(0, 1, 3)]


def test_what_cannot_travel_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(TypeError, match="top level"):
        run_distributed(local, 1)
    with pytest.raises(DistributedError, match="rank 0 raised"):
        run_distributed(return_something_local, 1)


def train_two_engines(stage: int) -> list[list[float]]:
    """Train a small model twice, each time with a new engine in the same process."""
    import deepspeed

    prepare_deepspeed()
    curves = []
    for _ in range(2):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage},
                "gradient_clipping": 1.0,
            },
        )
        data = torch.randn(4, 8)
        losses = []
        for _ in range(3):
            loss = torch.nn.functional.mse_loss(engine(data), data)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        curves.append(losses)
        engine.destroy()
    return curves


@pytest.mark.parametrize("world_size", [1, 2])
def test_deepspeed_engines_run_one_after_the_other(world_size: int) -> None:
    curves = {
        stage: run_distributed(train_two_engines, world_size, stage, timeout=120) for stage in (1, 2, 3)
    }
    for ranks in curves.values():
        for first, second in ranks:
            assert first == second
            assert first[-1] < first[0]
        # Every rank trains on the same data, so the stages and ranks agree up to rounding.
        assert ranks[0][0] == pytest.approx(curves[1][0][0], rel=1e-5)
