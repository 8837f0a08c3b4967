"""The hook that traces some steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.cuda._memory_viz import trace_plot
from torch.profiler import ProfilerActivity, profile

from pretrain.checkpoint.state import TrainingState
from pretrain.run.hooks import Hook, HookResult
from pretrain.utils.format import log_line

FOLDER = "profile"
MOST_ALLOCATIONS = 100_000
"""Of GPU memory, that a snapshot remembers."""
ROWS = 30
"""Of the table of operations."""


class Profiler(Hook):
    """Traces the steps from *first* to *last*, counted from 1.

    The traced steps are slower; their numbers are the same. In a session that begins between the two, the
    trace begins with it.

    Args:
        folder: where traces are written.
        rank: of this process, in their names.
        device: whose work is traced in addition to the CPU's.
    """

    name = "profile"

    def __init__(self, first: int, last: int, folder: Path, rank: int, device: torch.device) -> None:
        self.first, self.last = first, last
        self.folder, self.rank = folder, rank
        self.cuda = device.type == "cuda"
        self.running: profile | None = None

    def before_step(self, engine: Any, state: TrainingState) -> HookResult:
        """Begin the trace at its first step."""
        if self.running is None and self.first <= state.step + 1 <= self.last:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            if self.cuda:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            self.running = profile(activities=activities, record_shapes=True, profile_memory=True)
            self.running.start()
        return HookResult()

    def close(self) -> None:
        """End a trace that was cut off; nothing is written."""
        if self.running is not None:
            self.running.stop()
            self.running = None
            if self.cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def is_due(self, step: int) -> bool:
        """At the last traced step."""
        return step == self.last

    def run(self, engine: Any, state: TrainingState, row: Mapping[str, Any]) -> HookResult:
        """End the trace and write it."""
        if self.running is None:  # the session began after the trace
            return HookResult()
        tracer, self.running = self.running, None
        tracer.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace-rank{self.rank}.json.gz"
        tracer.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        table = tracer.key_averages().table(sort_by=by, row_limit=ROWS)
        (self.folder / f"operations-rank{self.rank}.txt").write_text(table + "\n", encoding="utf-8")
        lines = [log_line("profile", f"{trace}: open it at https://ui.perfetto.dev, or in chrome://tracing")]
        if self.cuda:
            page = self.folder / f"memory-rank{self.rank}.html"
            page.write_text(trace_plot(torch.cuda.memory._snapshot()), encoding="utf-8")
            torch.cuda.memory._record_memory_history(enabled=None)
            lines.append(log_line("profile", f"{page}: open it in a browser, which loads PyTorch's viewer"))
        return HookResult(lines=lines)
