"""Sends a session's values to the console, metrics.jsonl, wandb and TensorBoard: among them tokens per
second without the time spent on anything but training, and what a rank's own work takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from pretrain.metrics.console import Console
from pretrain.metrics.file import FILE_NAME, MetricsFile, to_plain_value
from pretrain.metrics.tracking import CLOSE_SECONDS, TensorBoardLogger, WandbLogger
from pretrain.runtime.world import World
from pretrain.utils.stdio import note_errors


class Metrics:
    """Shows and writes the metrics of one session of a run, on the main rank only.

    Use it as a context manager; its end shows the last values and gives wandb some time to finish.

    Args:
        folder: the run's folder.
        total_steps: the step at which the run ends.
        start_step: the step this session starts from; rows after it are of lost steps and are dropped.
        main: whether this rank shows and writes; the others only have ``throughput`` and ``pause``.
        flops_per_token: training FLOPs per token, for MFU.
        peak_flops: peak of all the run's devices together in FLOP/s, for MFU; None leaves MFU out.
        every_seconds: shortest time between two lines of a log.
        tensorboard: whether event files are also written.
        wandb: further arguments of WandbLogger: mode, project, config, group, tags.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        start_step: int = 0,
        main: bool = True,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        every_seconds: float = 5.0,
        tensorboard: bool = False,
        **wandb: Any,
    ) -> None:
        self.throughput = Throughput(flops_per_token, peak_flops)
        self._console: Console | None = None
        if not main:
            return
        self._console = Console(total_steps, start_step, every_seconds)
        self._file = MetricsFile(folder / FILE_NAME, report=self.message)
        self._file.truncate_after(start_step)
        self._wandb = WandbLogger(folder, newest_step=start_step, report=self.message, **wandb)
        self._tensorboard = TensorBoardLogger(folder, start_step + 1, self.message) if tensorboard else None

    def log(self, step: int, row: Mapping[str, Any], show: bool = True) -> None:
        """Record what was measured at *step*; what is measured later at the same step is added to its row.

        Args:
            show: whether the console has it too; of rows that are recorded together, the newest is enough.
        """
        if self._console is not None:
            row = {key: to_plain_value(value) for key, value in row.items()}
            self._file.append(step, row)
            if show:
                self._console.update(step, row)
            self._wandb.log(step, row)
            if self._tensorboard is not None:
                self._tensorboard.log(step, row)

    def message(self, text: str) -> None:
        """Print *text* on the main rank, above the bar if there is one."""
        if self._console is not None:
            self._console.message(text)

    def pause(self) -> AbstractContextManager[None]:
        """Leave the time spent inside (validation, saving) out of tokens/s and MFU."""
        return self.throughput.pause()

    def __enter__(self) -> Metrics:
        return self

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Show the last values, and give wandb so many *seconds* to finish."""
        if self._console is not None:
            with note_errors("last line", print):
                self._console.close()
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
            with note_errors("end of wandb's run", print):
                self._wandb.close(seconds)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error the launcher soon kills the ranks; what wandb lacks then can be synced later.
        self.close(CLOSE_SECONDS if error is None else 5.0)


class ForwardClock:
    """The time of this rank's forward passes, by its device's clock.

    The ranks wait for each other in every step, so that all of them take as long as the slowest. A forward
    pass of a whole model (t = c = 1, ZeRO stage 1 or 2) waits for nobody.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds, self._passes = 0.0, 0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the block as a pass. On a GPU nothing is waited for."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
        else:
            began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began_at.record()
            yield
            ended_at.record()
            self._events.append((began_at, ended_at))
        self._passes += 1

    def read(self) -> float:
        """Mean seconds of a pass since the last reading; NaN without one. Waits for the GPU's last pass."""
        for began_at, ended_at in self._events:
            ended_at.synchronize()
            self._seconds += began_at.elapsed_time(ended_at) / 1000
        passes, seconds = self._passes, self._seconds
        self._seconds, self._passes, self._events = 0.0, 0, []
        return seconds / passes if passes else float("nan")


def rank_values(clock: ForwardClock, world: World, rates: dict[str, float]) -> dict[str, float]:
    """The values ``ranks/…`` of the steps since the last call; none of a run of one rank. Collective.

    Args:
        rates: of all ranks, with tokens_per_second if it is known.
    """
    if world.size == 1:
        return {}
    seconds = world.gather(clock.read())
    slowest = max(range(world.size), key=seconds.__getitem__)
    values = {
        "ranks/forward_seconds": sum(seconds) / world.size,
        "ranks/forward_seconds_slowest": seconds[slowest],
        "ranks/slowest": slowest,
    }
    if "tokens_per_second" in rates:
        values["ranks/tokens_per_second"] = rates["tokens_per_second"] / world.size
    return values


class Throughput:
    """Tokens per second and MFU over the last steps, without the time spent in ``pause()``.

    MFU = tokens/s × training FLOPs per token ÷ peak FLOP/s.

    Args:
        flops_per_token: training FLOPs per token.
        peak_flops: peak of all devices together, in FLOP/s.
        window: number of the latest counts that the values are averaged over.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        window: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.clock = clock
        self._paused = 0.0
        self._tokens = 0
        self._began = clock()
        # The state after each of the last steps: (training seconds, tokens).
        self._steps: deque[tuple[float, int]] = deque(maxlen=window + 1)

    def change_model(self, flops_per_token: float) -> None:
        """Continue with a model of other FLOPs per token: what was counted before says nothing of it."""
        self.flops_per_token = flops_per_token
        self._steps.clear()

    @property
    def seconds(self) -> float:
        """Seconds of training since construction, without the pauses."""
        return self.clock() - self._began - self._paused

    def add(self, tokens: int) -> None:
        """Count *tokens* tokens (of all ranks) as done at this moment: those of a step, or of several read at
        once."""
        self._tokens += tokens
        self._steps.append((self.seconds, self._tokens))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time spent inside."""
        began = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - began

    def rates(self) -> dict[str, float]:
        """Return ``tokens_per_second`` and ``mfu`` as far as they are known.

        They start with the second step: the first one compiles and fills caches.
        """
        if len(self._steps) < 2:
            return {}
        (first_seconds, first_tokens), (seconds, tokens) = self._steps[0], self._steps[-1]
        if seconds <= first_seconds:
            return {}
        rates = {"tokens_per_second": (tokens - first_tokens) / (seconds - first_seconds)}
        if self.flops_per_token and self.peak_flops:
            rates["mfu"] = rates["tokens_per_second"] * self.flops_per_token / self.peak_flops
        return rates
