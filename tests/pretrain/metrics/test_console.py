"""The progress display: what a line says, when it appears, and the bar of a terminal."""

from __future__ import annotations

import io

from pretrain.metrics.console import Console


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


def test_a_terminal_gets_a_bar_and_messages_above_it() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    console = Console(4, stream=stream)
    console.update(2, {"train_loss": 1.5, "val_loss": 2.0})
    console.message("saved a checkpoint")
    console.update(4, {"train_loss": 1.25})
    console.close()
    shown = stream.getvalue()
    assert "step 2/4 | loss 1.5000 | val loss 2.0000\n" in shown and "saved a checkpoint\n" in shown
    assert "100% |" in shown and "step 4/4 | loss 1.2500" in shown


def test_a_validation_loss_is_shown_as_of_its_step() -> None:
    stream = io.StringIO()
    log = Console(30, stream=stream)
    log.update(3, {"train_loss": 1.0, "val_loss": 2.0})
    log.update(4, {"train_loss": 0.5})
    assert "val loss" not in log.line() and "val loss 2.0000" in stream.getvalue()
