"""Sends a session's figures to the console, metrics.jsonl, wandb and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pretrain.metrics.console import Console
from pretrain.metrics.file import FILE_NAME, MetricsFile, to_plain_value
from pretrain.metrics.tensorboard import TensorBoardLogger
from pretrain.metrics.throughput import Throughput
from pretrain.metrics.tracking import CLOSE_SECONDS, WandbLogger
from pretrain.utils.stdio import note_errors


class Metrics:
    """Shows and writes the figures of one session of a run, on the main rank only.

    Use it as a context manager; its end shows the last figures and gives wandb some time to finish.

    Args:
        folder: the run's folder.
        total_steps: the step at which the run ends.
        start_step: the step this session starts from; rows after it are of lost steps and are dropped.
        main: whether this rank shows and writes; the others only have ``throughput`` and ``pause``.
        flops_per_token: training FLOPs per token, for MFU.
        peak_flops: peak of all the run's devices together in FLOP/s, for MFU; None leaves MFU out.
        every_seconds: shortest time between two lines of a log.
        tensorboard: whether event files are written, too.
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

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Record what was measured at *step*; what is measured later at the same step is added to its row."""
        if self._console is not None:
            row = {key: to_plain_value(value) for key, value in row.items()}
            self._file.append(step, row)
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
        """Show the last figures, and give wandb so many *seconds* to finish."""
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
