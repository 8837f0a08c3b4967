"""Identifies processes: their numbers are reused, and the clock that tells their start can be set."""

from __future__ import annotations

from pathlib import Path

import psutil

_PROC = Path("/proc")


def identity(process: int) -> str | None:
    """A string that identifies a running process among all that had its number; None if there is none (or a
    zombie).

    On Linux the boot and the clock ticks from boot to the process's start: neither moves when the clock is
    set, as psutil's start time does. Elsewhere psutil's start time.
    """
    try:
        # The second field is the program's name in parentheses, which may hold anything.
        fields = (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return None if fields[0] in "ZXx" else f"{boot} {int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return _by_clock(process)


def _by_clock(process: int) -> str | None:
    try:
        running = psutil.Process(process)
        return None if running.status() == psutil.STATUS_ZOMBIE else f"{running.create_time():.2f}"
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None
    except psutil.AccessDenied:
        return "hidden"
