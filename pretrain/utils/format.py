"""Numbers, durations, labelled lines and tables as text, and the progress of what takes longer than a few
seconds."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from model.errors import escape_controls


def log_line(label: str, text: object) -> str:
    """The line ``label    text`` of a command's output; labels have the width of "finished", and
    so has their absence before further lines of *text*. On a terminal lines end at its last column; a log has
    whole lines, which can be searched."""
    whole = escape_controls(str(text), kept="\n")
    return f"{label:<8} " + wrap_text(whole, terminal_columns(sys.stdout) - 9).replace("\n", f"\n{'':9}")


def wrap_text(text: str, columns: int, separator: str = " ") -> str:
    """*text* in lines of at most *columns*, broken at the last *separator* that fits; longer parts stay
    whole, and so does everything where there are fewer than 20 columns."""
    if columns < 20:
        return text
    lines = []
    for line in text.split("\n"):
        first, *others = line.split(separator)
        for part in others:
            if len(longer := first + separator + part) <= columns:
                first = longer
            else:
                lines.append(first)
                first = part
        lines.append(first)
    return "\n".join(lines)


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print lines at once, also into a log. Control characters, which names and texts of others may hold, are
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
        join: joins names.
    """
    names: dict[str, list[str]] = {}
    for name, value in values:
        if value is not None:
            names.setdefault(str(value), []).append(name)
    return "; ".join(f"{value} ({join(having)})" for value, having in names.items()) if len(names) > 1 else ""


def shorten_names(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def name_folders(folders: Sequence[Path]) -> list[str]:
    """What to call them: their own names, or their paths where two have one name."""
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder) for folder in folders]


def count_of(number: int, noun: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


NOTHING = "—"
"""A cell without a value."""


def interval_text(value: float, low: float, high: float, form: str = "+.4f") -> str:
    """A value with the ends of its interval: +0.0310 [+0.0080, +0.0540]."""
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Lines with the cells of a table in columns, two spaces apart, without spaces at their ends.

    Args:
        rows: cells, the same number in every row; the first row may be a header.
        left: columns that are aligned on the left; all others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def terminal_columns(stream: TextIO) -> int:
    """Columns of the terminal that *stream* writes to; 0 for a file, and for a terminal that does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


class ProgressLine:
    """Shows how much is done: a bar on a terminal, a line every few seconds in a log.

    Args:
        what: what is done, such as ``heads removed``.
        unit: what is counted, such as ``pass``.
        stream: standard output by default.
        every_seconds: shortest time between two lines of a log.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        stream: TextIO | None = None,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.unit = what, unit
        self.stream = sys.stdout if stream is None else stream
        self.every_seconds, self.clock = every_seconds, clock
        self._started = self._printed = clock()
        self._bar: Any = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Show that *done* of *total* units are done."""
        if terminal_columns(self.stream):
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, file=self.stream, desc=self.what, unit=self.unit, leave=False)
            self._bar.update(done - self._bar.n)
            return
        now = self.clock()
        if now - self._printed < self.every_seconds:
            return
        self._printed = now
        left = human_seconds((now - self._started) / done * (total - done))
        print(f"{self.what}: {self.unit} {done:,} of {total:,}, {left} left", file=self.stream, flush=True)
