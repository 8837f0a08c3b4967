"""The progress display: what a line says, when it appears, and the bar of a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from typing import TextIO
from unittest import mock

import pytest

from pretrain.metrics.console import Console
from pretrain.utils.format import human_seconds


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ROW = {"train_loss": 5.12345, "val_loss": 5.3, "val_bpb": 2.25, "lr/base": 3e-4, "lr/upper_qk": 7.5e-5}
ROW |= {"grad_norm": 0.91, "tokens_per_second": 4120.0, "mfu": 0.1234, "skipped": 2}


def test_a_line_has_every_figure() -> None:
    clock = Clock()
    console = Console(2000, stream=io.StringIO(), clock=clock)
    console.update(100, {})
    clock.now += 20
    console.update(120, ROW)
    assert console.line() == (
        "step  120/2000 | loss 5.1235 | val loss 5.3000 | 2.2500 bits/byte | lr 7.50e-05 to 3.00e-04"
        " | grad norm 0.910 | 4.12k tokens/s | MFU 12.3% | skipped 2 | 31m20s left"
    )


def test_unknown_figures_are_left_out() -> None:
    console = Console(10, stream=io.StringIO())
    console.update(1, {"lr/base": 1e-3, "lr/no_decay": 1e-3, "skipped": 0})
    assert console.line() == "step  1/10 | lr 1.00e-03"


def test_a_log_has_a_line_every_few_seconds_and_one_for_each_validation() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(30, every_seconds=5, stream=stream, clock=clock)
    for step in range(1, 13):
        clock.now += 1
        console.update(step, {"train_loss": 1.0})
    console.update(12, {"val_loss": 2.0})
    console.message("saved")
    console.update(13, {})
    console.close()
    shown = [line.split(" | ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["step  5/30", "step 10/30", "step 12/30", "saved", "step 13/30"]


def test_time_left_leaves_out_the_first_step_and_earlier_sessions() -> None:
    clock = Clock()
    console = Console(100, start_step=50, stream=io.StringIO(), clock=clock)
    clock.now += 60  # the first step compiles
    console.update(51, {})
    assert console.seconds_left() is None
    clock.now += 4
    console.update(53, {})
    assert console.seconds_left() == 94


class Screen:
    """What a terminal of so many columns shows of the bytes that it gets; lines that scroll off stay."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def feed(self, text: str) -> None:
        """Text, carriage returns and line ends; tqdm sends nothing else for one bar."""
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
            else:
                assert character.isprintable(), repr(character)
                if self.columns and self.column == self.columns:
                    self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1


def received(stream: TextIO, controller: int) -> str:
    """What a terminal got since the last call; the system hands it on a little later."""
    print(end="\0", file=stream, flush=True)
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(controller, 1 << 16)
    return text.decode().removesuffix("\0")


def shown_by(columns: int, steps: int, every: int) -> tuple[list[str], Screen]:
    """A run of 40 steps on a real terminal: its last line after each step, and the screen in the end."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    clock, screen, last = Clock(), Screen(columns), []
    with os.fdopen(terminal, "w") as stream, mock.patch("tqdm.std.tqdm.monitor_interval", 0):
        console = Console(steps, start_step=steps - 40, stream=stream, clock=clock)
        if console._bar is not None:
            console._bar.mininterval = 0
        for step in range(steps - 39, steps + 1):
            clock.now += every
            row = ROW | {"train_loss": 12.34567, "tokens_per_second": 999_400.0}
            console.update(step, row if step % 10 == 0 else {k: v for k, v in row.items() if "val" not in k})
            screen.feed(received(stream, controller))
            last.append(screen.lines[-1].strip())
        console.close()
        console.close()  # again, by what holds it
        screen.feed(received(stream, controller))
    os.close(controller)
    return last, screen


@pytest.mark.parametrize("steps", [40, 40_000, 2_000_000])
@pytest.mark.parametrize("columns", [132, 80, 40])
def test_a_terminal_shows_whole_figures(columns: int, steps: int) -> None:
    last, screen = shown_by(columns, steps, every=3000)
    for step, line in enumerate(last[1:], steps - 38):
        assert len(line) <= columns and f"step {step:>{len(str(steps))}}/{steps}" in line, line
        figures = [part.strip() for part in re.split(r" \| |  ", line.partition("step ")[2])][1:]
        wanted = ["loss 12.3457", f"{human_seconds(3000 * (steps - step))} left", "999k tokens/s"]
        assert figures[:3] == wanted if columns >= 80 else set(figures) <= set(wanted) and figures, line
        assert all(re.fullmatch(r"[a-zA-Z -]*[\d.]+\S*( \S+)*", figure) for figure in figures), line
    shown = "".join(screen.lines).split("step ")
    validated = {int(line.split("/")[0]) for line in shown if "bits/byte" in line}
    assert validated == {*range(steps - 30, steps + 1, 10)}


def test_a_terminal_without_a_size_gets_lines() -> None:
    lines = shown_by(0, 40, every=3)[1].lines
    steps = [int(line.split("/")[0].removeprefix("step")) for line in lines if line.startswith("step")]
    assert steps == [*range(2, 41, 2)] and "bits/byte" in lines[4]


def test_a_validation_loss_is_shown_as_of_its_step() -> None:
    stream = io.StringIO()
    log = Console(30, stream=stream)
    log.update(3, {"train_loss": 1.0, "val_loss": 2.0})
    log.update(4, {"train_loss": 0.5})
    assert "val loss" not in log.line() and "val loss 2.0000" in stream.getvalue()
