"""The processes of a run and what each computes on: ranks, device, threads, versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from model.errors import UserError
from model.parallel_plan import check_world
from model.process_grid import ALONE, ProcessGrid, start_grid
from pretrain.config.sections import InterruptionConfig
from pretrain.runtime.environment import check_environment, rendezvous_port
from pretrain.runtime.hardware import available_cores, describe_device
from pretrain.runtime.rendezvous import BACKENDS, check_group, meet
from pretrain.utils.format import print_lines
from pretrain.utils.malloc import keep_freed_memory

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def collective_timeout(settings: InterruptionConfig) -> timedelta:
    """Time after which a collective fails: longer than the watchdog waits, or it could never name the rank
    that hangs."""
    return max(COLLECTIVE_TIMEOUT, timedelta(minutes=settings.hang_minutes + 5))


@dataclass(frozen=True)
class World:
    """One rank's view of the run's processes."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    grid: ProcessGrid = ALONE
    """This rank's place among the ranks that share a copy of the model, and the groups it shares work
    with."""
    timeout: timedelta = COLLECTIVE_TIMEOUT
    """Time after which a collective fails that some rank does not join."""

    @property
    def tensor_parallel(self) -> int:
        """t: ranks that share one copy of the model and read the same batches; they are neighbours."""
        return self.grid.tensor_parallel

    @property
    def context_parallel(self) -> int:
        """c: ranks that share the positions of a batch."""
        return self.grid.context_parallel

    @property
    def data_parallel(self) -> int:
        """Number of parts of a batch that are read at a time, each by the t c ranks of one place."""
        return self.size // (self.tensor_parallel * self.context_parallel)

    @property
    def data_rank(self) -> int:
        """Which part of a batch this rank reads."""
        return self.rank // (self.tensor_parallel * self.context_parallel)

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes the shared files."""
        return self.rank == 0

    def record(self) -> dict[str, Any]:
        """What bit-identical numbers depend on, besides settings, as stored with every checkpoint."""
        import deepspeed

        return {
            "ranks": self.size,
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "device": self.device.type,
            "hardware": describe_device(self.device),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "deepspeed": deepspeed.__version__,
            },
        }

    def print_rank_zero(self, *lines: object) -> None:
        """Print lines, on the main rank only."""
        if self.is_main:
            print_lines(*lines)

    def first_problem(self, problem: str | None) -> str | None:
        """Share a problem among all ranks: every rank gets the first one (naming its rank), or None.

        Collective: all ranks must call it.
        """
        return next(
            (
                f"rank {rank}: {text}" if rank else text
                for rank, text in enumerate(self.gather(problem))
                if text
            ),
            None,
        )

    def gather(self, value: Any) -> list[Any]:
        """Every rank's *value*, in rank order, on every rank. Collective."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's *value* on every rank. Collective."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_rank_zero(self, make: Callable[[], T]) -> T:
        """What *make* returns on rank 0, the only rank to call it, on every rank. Collective.

        Raises:
            UserError: on every rank, when *make* raises one.
        """
        if self.size == 1:
            return make()
        value, problem = None, None
        if self.is_main:
            try:
                value = make()
            except UserError as error:  # the others wait for an answer, whatever it is
                problem = type(error), str(error)
        value, problem = self.broadcast((value, problem))
        if problem is not None:
            kind, text = problem
            raise kind(text)
        return cast(T, value)

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        """What *make*, which every rank calls and which uses no collective, returns on this rank. Collective.

        Raises:
            UserError: on every rank, when *make* raises one on any.
        """
        value, problem = None, None
        try:
            value = make()
        except UserError as error:
            problem = type(error), str(error)
        for rank, first in enumerate(self.gather(problem)):
            if first is not None:
                kind, text = first
                raise kind(f"rank {rank}: {text}" if rank else text)
        return cast(T, value)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum *tensor* over the data-parallel ranks, in place. Collective.

        The ranks of a tensor or context group hold the same value, so every rank gets the same sum.
        """
        if self.data_parallel > 1:
            dist.all_reduce(tensor, group=self.grid.data_group)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of *tensor* over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor


def single_world(device: torch.device) -> World:
    """The World of a single process without a process group."""
    return World(rank=0, local_rank=0, size=1, local_size=1, device=device)


def start_world(
    threads: int | None,
    deterministic: bool,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
    head_group_sizes: Collection[int] | None = None,
    context_parallel: int = 1,
    context_head_ranks: Collection[int] | None = None,
) -> World:
    """Join the process group (gloo on CPU, NCCL on CUDA), lay out the grid and settle device and threads.

    Without a launcher's environment the world size is 1. DeepSpeed must be prepared first
    (pretrain.engine.patches.prepare_deepspeed), or it compiles an extension that is not needed.

    Args:
        threads: CPU threads per rank; None takes OMP_NUM_THREADS, else the cores shared among the local
            ranks.
        deterministic: ask torch for deterministic kernels.
        tensor_parallel: ranks that share one copy of the model.
        sequence_parallel: see model.process_grid.ProcessGrid.
        timeout: time after which a collective fails that some rank does not join.
        head_group_sizes: see model.process_grid.start_grid.
        context_parallel: ranks that share the positions of a batch.
        context_head_ranks: see model.process_grid.start_grid.

    Raises:
        UserError: the launcher's environment is not valid, or the degrees do not divide the number of
            ranks (no rank has joined anything then); devices that do not match.
    """
    import deepspeed

    launch = check_environment()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ["MASTER_PORT"] = str(rendezvous_port(launch))
    size, local_size, local_rank = launch.size, launch.local_size, launch.local_rank
    check_world(size, tensor_parallel, context_parallel)
    if threads is None:
        # torch has read it when it was imported; a caller may have set another number since.
        given = os.environ.get("OMP_NUM_THREADS")  # a number for each level of nesting
        threads = int(given.split(",")[0]) if given else max(1, available_cores() // local_size)
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = check_group(launch) if dist.is_initialized() else meet(launch.rank, size, timeout)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        # cuDNN's attention gives gradients that are not finite for some masks and shapes (pytorch issue
        # 196678). Flash and the memory-efficient kernel take all that it takes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    # Also where a process group exists: DeepSpeed's own module must know of it before zero.Init asks for its
    # size.
    deepspeed.init_distributed(
        dist_backend=BACKENDS[device.type],
        auto_mpi_discovery=False,
        timeout=timeout,
        verbose=False,
    )
    return World(
        grid=start_grid(
            tensor_parallel,
            sequence_parallel=sequence_parallel,
            timeout=timeout,
            head_group_sizes=head_group_sizes,
            context_parallel=context_parallel,
            context_head_ranks=context_head_ranks,
        ),
        timeout=timeout,
        rank=dist.get_rank(),
        local_rank=local_rank,
        size=dist.get_world_size(),
        local_size=local_size,
        device=device,
    )
