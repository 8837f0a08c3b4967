"""Shows a run's progress: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from pretrain.utils.text import human_number, human_seconds

BAR_FORMAT = "{percentage:3.0f}% |{bar:20}| {desc}"
# Figure -> its text, in the order of a line; those of a validation belong to the step that they were measured
# at.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "train_loss": "loss {:.4f}".format,
    "val_loss": "val loss {}".format,
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
    """Shows the newest value of each figure, and keeps messages apart from them.

    A validation loss appears in the line of its own step only; a bar keeps it, with the step it belongs to.

    Args:
        total_steps: the step at which the run ends.
        start_step: the step from which this session starts (more than 0 after a resume).
        every_seconds: shortest time between two lines of a log; lines with a validation loss always appear.
        stream: where to print; standard output by default.
        interactive: whether to draw a bar; by default when *stream* is a terminal.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        every_seconds: float = 5.0,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self.stream = sys.stdout if stream is None else stream
        self.clock = clock
        self.step = start_step
        self.latest: dict[str, Any] = {}
        interactive = self.stream.isatty() if interactive is None else interactive
        self._bar: tqdm[Any] | None = None
        if interactive:
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
        self._validated: int | None = None
        """The step of the newest validation loss."""

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Store the figures of *row*, and show them if a line is due."""
        now = self.clock()
        if self._first is None:
            self._first = (step, now)
        self.latest.update(row)
        if "val_loss" in row:
            self._validated = step
        advance, self.step = step - self.step, step
        if self._bar is not None:
            # tqdm itself redraws at most ten times a second.
            self._bar.set_description_str(self.line(), refresh=False)
            self._bar.update(advance)
        elif "val_loss" in row or now - self._printed_at >= self.every_seconds:
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
            self._bar.set_description_str(self.line(), refresh=True)
            self._bar.close()
            self._bar = None
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
        """Return the newest figures in one line, leaving out those that are not known."""
        width = len(str(self.total_steps))
        known = {name: value for name, value in self.latest.items() if not name.startswith("val_")}
        if self._validated is not None and (self._bar is not None or self._validated == self.step):
            of_step = "" if self._validated == self.step else f" at step {self._validated}"
            known = self.latest | {"val_loss": f"{self.latest['val_loss']:.4f}{of_step}"}
        if rates := sorted({value for name, value in known.items() if name.startswith("lr/")}):
            known["lr"] = " to ".join(f"{rate:.2e}" for rate in (rates[0], rates[-1])[: len(rates)])
        if not known.get("skipped"):
            known.pop("skipped", None)
        if (left := self.seconds_left()) is not None:
            known["left"] = left
        figures = [text(known[name]) for name, text in _TEXTS.items() if name in known]
        return " | ".join([f"step {self.step:>{width}}/{self.total_steps}", *figures])

    def _print_line(self) -> None:
        print(self.line(), file=self.stream, flush=True)
        self._printed_at = self.clock()
        self._printed_step = self.step
