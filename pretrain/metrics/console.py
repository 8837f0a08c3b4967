"""Shows a run's progress: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from pretrain.utils.format import human_number, human_seconds, terminal_columns, wrap_text

BAR_FORMAT = "{percentage:3.0f}% |{bar}| {desc}"
BAR_COLUMNS = 18
"""Columns of the percentage and of a bar of ten, with a space next to it."""
SEPARATOR = " | "
"""Between the values of a line."""
WIDE = 80
"""Columns of a usual terminal."""
FIRST = ("train_loss", "left", "tokens_per_second")
"""What a terminal shows first; other values follow if there is room."""
# Value -> its text, in the order of a line.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "train_loss": "loss {:.4f}".format,
    "val_loss": "val loss {:.4f}".format,
    "val_bpb": "{:.4f} bits/byte".format,
    "val_accuracy": "accuracy {:.2%}".format,
    "lr": "lr {}".format,
    "grad_norm": "grad norm {:.3f}".format,
    "tokens_per_second": lambda value: f"{human_number(value)} tokens/s",
    "mfu": "MFU {:.1%}".format,
    "skipped": "skipped {}".format,
    "left": lambda seconds: f"{human_seconds(seconds)} left",
}


class Console:
    """Shows the newest value of each metric, and keeps messages separate from them.

    Results of a validation appear only in the line of their step.

    Args:
        total_steps: the step at which the run ends.
        start_step: the step from which this session starts (more than 0 after a resume).
        every_seconds: shortest time between two lines of a log; lines with a validation loss always appear.
        stream: where to print; a bar is drawn when it is a terminal. Standard output by default.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        every_seconds: float = 5.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self.stream = sys.stdout if stream is None else stream
        self.clock = clock
        self.step = start_step
        self.latest: dict[str, Any] = {}
        self._bar: tqdm[Any] | None = None
        if terminal_columns(self.stream):
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=self.stream,
                bar_format=BAR_FORMAT,
                dynamic_ncols=True,
                desc="starting",
            )
        # The first step compiles and fills caches: the time left is estimated from those after it.
        self._first: tuple[int, float] | None = None
        self._printed_at = clock()
        self._printed_step = start_step

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Store the values of *row*, and show them if a line is due."""
        now = self.clock()
        if self._first is None:
            self._first = (step, now)
        if step != self.step:
            self.latest = {name: value for name, value in self.latest.items() if not name.startswith("val_")}
        self.latest.update(row)
        advance, self.step = step - self.step, step
        if self._bar is not None:
            # tqdm itself redraws at most ten times a second.
            self._describe()
            self._bar.update(advance)
        # What is measured later at the same step is no reason to print it again.
        waited = step != self._printed_step and now - self._printed_at >= self.every_seconds
        if "val_loss" in row or (self._bar is None and waited):
            self._print_line()

    def message(self, text: str) -> None:
        """Print *text* above the bar, or as lines of the log."""
        if self._bar is not None:
            tqdm.write(text, file=self.stream)
        else:
            print(text, file=self.stream)
        self.stream.flush()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._describe()
            self._bar.refresh()
            self._bar.close()
            self._bar, self._printed_step = None, self.step
        elif self.step != self._printed_step:
            self._print_line()

    def seconds_left(self) -> float | None:
        """Return the time to the last step at this session's pace, validation and saving included."""
        if self._first is None or self.step <= self._first[0]:
            return None
        first_step, first_time = self._first
        pace = (self.clock() - first_time) / (self.step - first_step)
        return pace * (self.total_steps - self.step)

    def line(self) -> str:
        """Return the newest values as a line of text, leaving out those that are not known."""
        return SEPARATOR.join(self._texts().values())

    def _texts(self) -> dict[str, str]:
        """The step and the newest values as text, in the order of a line."""
        width = len(str(self.total_steps))
        known = dict(self.latest)
        if rates := sorted({value for name, value in known.items() if name.startswith("lr/")}):
            known["lr"] = " to ".join(f"{rate:.2e}" for rate in (rates[0], rates[-1])[: len(rates)])
        if not known.get("skipped"):
            known.pop("skipped", None)
        if (left := self.seconds_left()) is not None:
            known["left"] = left
        texts = {name: text(known[name]) for name, text in _TEXTS.items() if name in known}
        return {"step": f"step {self.step:>{width}}/{self.total_steps}"} | texts

    def _describe(self) -> None:
        """Show next to the bar as many values as fit into the terminal; none is cut off."""
        assert self._bar is not None
        columns, texts = terminal_columns(self.stream), self._texts()
        shown, separator = texts.pop("step"), SEPARATOR if columns >= WIDE else "  "
        for name in sorted(texts, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
            room = columns - (BAR_COLUMNS if name not in FIRST else 0)
            if len(longer := shown + separator + texts[name]) <= room:
                shown = longer
        beside = len(shown) + BAR_COLUMNS <= columns
        self._bar.bar_format = BAR_FORMAT if beside else "{desc}"
        self._bar.set_description_str(shown, refresh=False)

    def _print_line(self) -> None:
        columns = terminal_columns(self.stream)
        self.message(wrap_text(self.line(), columns - 7, SEPARATOR).replace("\n", f"\n{'':4}{SEPARATOR}"))
        self._printed_at = self.clock()
        self._printed_step = self.step
