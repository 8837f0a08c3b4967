"""Numbers, durations and labelled lines as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from model.errors import escape_controls


def log_line(label: str, text: object) -> str:
    """The line ``label    text`` of a command's output; labels have the width of "finished", and
    so has their absence before further lines of *text*."""
    return f"{label:<8} " + escape_controls(str(text), kept="\n").replace("\n", f"\n{'':9}")


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print lines at once, into a log, too. Control characters, which names and texts of others may hold, are
    written as in a repr."""
    for line in lines:
        print(escape_controls(str(line), kept="\n\t"), file=file, flush=True)


def describe_several(
    values: Iterable[tuple[str, object]], join: Callable[[Sequence[str]], str] = ", ".join
) -> str:
    """``value (names); value (names)`` of names with their values, in order; empty unless there are two
    values or more.

    Args:
        values: a name and its value each; a name whose value is None is left out.
        listed: how names are joined.
    """
    names: dict[str, list[str]] = {}
    for name, value in values:
        if value is not None:
            names.setdefault(str(value), []).append(name)
    return "; ".join(f"{value} ({join(having)})" for value, having in names.items()) if len(names) > 1 else ""


def human_number(value: float) -> str:
    """Return *value* with three significant digits and a unit: 987, 4.12k, 1.25M, 3.00B."""
    if not math.isfinite(value):
        return str(value)
    # Rounding first: 999,950 is 1.00M, not 1000k.
    rounded = float(f"{value:.3g}")
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= size:
            scaled = rounded / size
            digits = 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{rounded:g}"


def human_seconds(seconds: float) -> str:
    """Format a duration in seconds: 42s, 3m20s, 2h05m, 3d04h."""
    if not math.isfinite(seconds):
        return str(seconds)
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    if minutes:
        return f"{minutes}m{second:02d}s"
    return f"{second}s"
