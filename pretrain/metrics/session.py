"""What a run measures, and where it goes: the console, metrics.jsonl and wandb."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from pretrain.metrics.console import Console
from pretrain.metrics.tracking import CLOSE_SECONDS, Mode, WandbLogger

FILE_NAME = "metrics.jsonl"
# JSON has no word for these; as strings, float() reads them back and so does every data frame library.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Metrics:
    """Everything measured in one session of a run. Only the main rank shows and writes it.

    Use it as a context manager; ``close`` shows the last figures and lets wandb finish.

    Args:
        folder: the run's folder.
        total_steps: the step at which the run ends.
        start_step: the step this session starts from; rows after it are of a lost future and are dropped.
        main: whether this rank shows and writes; the others only have ``throughput`` and ``pause``.
        flops_per_token: training FLOPs per token, for MFU.
        peak_flops: peak of all the run's devices together in FLOP/s, for MFU; None leaves MFU out.
        every_seconds: shortest time between two lines of a log.
        wandb: auto, online, offline or disabled (see tracking.py).
        wandb_project: the project that the run is filed under.
        config: what wandb shows as the run's configuration.
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
        wandb: Mode = "auto",
        wandb_project: str = "head-schedules",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.throughput = Throughput(flops_per_token, peak_flops)
        self._console: Console | None = None
        self._file: MetricsFile | None = None
        self._wandb: WandbLogger | None = None
        if not main:
            return
        self._console = Console(total_steps, start_step, every_seconds)
        self._file = MetricsFile(folder / FILE_NAME, report=self.message)
        self._file.truncate_after(start_step)
        self._wandb = WandbLogger(
            folder, mode=wandb, project=wandb_project, config=config or {}, report=self.message
        )

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Record what was measured at *step*; a step may have several rows, with different keys."""
        row = {key: plain(value) for key, value in row.items()}
        if self._file is not None:
            self._file.append(step, row)
        if self._console is not None:
            self._console.update(step, row)
        if self._wandb is not None:
            self._wandb.log(step, row)

    def message(self, text: str) -> None:
        """Print *text* on the main rank, above the bar if there is one."""
        if self._console is not None:
            self._console.message(text)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time spent inside (validation, saving) out of tokens/s and MFU."""
        with self.throughput.pause():
            yield

    def close(self, wandb_seconds: float = CLOSE_SECONDS) -> None:
        """Show the last figures, close the file, and give wandb some time to write what it has."""
        if self._console is not None:
            self._console.close()
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.close(wandb_seconds)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the launcher soon kills the ranks; what wandb lacks then can be synced later.
        self.close(CLOSE_SECONDS if error is None else 5.0)


class Throughput:
    """Tokens per second and MFU over the last steps, without the time spent in ``pause()``.

    MFU = tokens/s × training FLOPs per token ÷ peak FLOP/s.

    Args:
        flops_per_token: training FLOPs per token.
        peak_flops: peak of all devices together, in FLOP/s.
        window: number of the latest counts that the figures are taken over.
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
        self._pauses = 0
        self._tokens = 0
        self._began = clock()
        # The state after each of the last steps: (training seconds, tokens).
        self._steps: deque[tuple[float, int]] = deque(maxlen=window + 1)

    @property
    def seconds(self) -> float:
        """Seconds of training since construction, without the pauses."""
        return self.clock() - self._began - self._paused

    def add(self, tokens: int) -> None:
        """Count *tokens* tokens (of all ranks) as done at this moment: those of a step, or of several read at once."""
        self._tokens += tokens
        self._steps.append((self.seconds, self._tokens))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time spent inside; pauses may be nested."""
        began = self.clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
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


class MetricsFile:
    """A file of JSON objects, one a line, each written whole as soon as it is known.

    Args:
        path: the file; it is created with the first row.
        report: where to say that rows cannot be written.
    """

    def __init__(self, path: Path, report: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._report = report or (lambda text: print(text, file=sys.stderr))
        self._descriptor: int | None = None
        self._size = 0
        self._lost = 0

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Write one row. A full disk loses rows, which is said once; it does not end the training."""
        line = json.dumps({"step": step, **{key: _encode(plain(value)) for key, value in row.items()}})
        try:
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            data = line.encode() + b"\n"
            if self._lost:  # a write that the full disk cut short would spoil this row too
                os.ftruncate(self._descriptor, self._size)
            if os.write(self._descriptor, data) != len(data):
                raise OSError(28, "No space left on device")
            self._size += len(data)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                self._report(f"warning: cannot write {self.path} ({error.strerror}); training goes on")

    def truncate_after(self, step: int) -> int:
        """Drop the rows after *step* and lines that are no row; return how many lines went.

        What remains replaces the file at once: an interruption leaves the old file or the new one.
        """
        self.close()
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return 0
        kept, dropped = [], 0
        for line in filter(None, lines):
            row = _parse(line)
            if row is not None and row["step"] <= step:
                kept.append(line + b"\n")
            else:
                dropped += 1
        if dropped or (lines and lines[-1]):  # the last line lacks its end
            partial = self.path.with_name(self.path.name + ".partial")
            with partial.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        return dropped

    def close(self) -> None:
        """Close the file; ``append`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        """Open for appending, after the last complete line."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = self.path.read_bytes()
        self._size = content.rfind(b"\n") + 1
        if self._size != len(content):
            os.ftruncate(self._descriptor, self._size)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file in order of step, with rows of the same step merged into one.

    *path* may be the run's folder. Lines that are no row, such as a half-written last one, are left out.
    """
    path = path / FILE_NAME if path.is_dir() else path
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        row = _parse(line)
        if row is not None:
            merged.setdefault(row["step"], {}).update({key: _decode(value) for key, value in row.items()})
    return [merged[step] for step in sorted(merged)]


def plain(value: Any) -> Any:
    """Return a Python number for a one-element tensor or NumPy value, anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row that *line* holds, or None if it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
