"""Writes a run's figures for TensorBoard, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import quote
from pretrain.utils.format import log_line

FOLDER = "tensorboard"


class TensorBoardLogger:
    """One event file for each session of a run, in the run's folder ``tensorboard``.

    The files are written by a thread of the library's. What fails is said once, and no step waits or ends for
    it. TensorBoard leaves out what an earlier session logged from the first step of a later one on.

    Args:
        folder: the run's.
        first_step: the first step that this session trains.
        report: where to say what fails.
    """

    def __init__(self, folder: Path, first_step: int, report: Callable[[str], None] = print) -> None:
        self._writer: Any = None
        self._report = report
        with self._report_failure():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / FOLDER), purge_step=first_step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row; lists and text are left to metrics.jsonl."""
        if self._writer is not None:
            with self._report_failure():
                for key, value in row.items():
                    if isinstance(value, int | float) and not isinstance(value, bool):
                        self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            with self._report_failure():
                self._writer.close()

    @contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Say what failed in the block, and write no more."""
        try:
            yield
        except Exception as error:
            self._writer = None
            text = f"stopped ({quote(error, 200, plain=True)}); the run goes on, metrics.jsonl has everything"
            self._report(log_line("tensorboard", text))
