"""Tokens per second and MFU."""

from __future__ import annotations

from pretrain.metrics.metrics import Throughput


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_throughput_leaves_out_the_first_step_and_pauses() -> None:
    clock = Clock()
    meter = Throughput(flops_per_token=10.0, peak_flops=4000.0, window=3, clock=clock)
    clock.now += 50  # the first step compiles
    meter.add(100)
    assert meter.rates() == {}
    for _ in range(2):
        clock.now += 1
        meter.add(100)
        with meter.pause():
            clock.now += 25
    assert meter.rates() == {"tokens_per_second": 100.0, "mfu": 0.25}
    assert meter.seconds == 52
    for _ in range(3):  # the window slides: only the last three steps count
        clock.now += 2
        meter.add(100)
    assert meter.rates()["tokens_per_second"] == 50
    meter.change_model(20.0)  # of the new model nothing is known yet
    assert meter.rates() == {}
    for _ in range(2):
        clock.now += 1
        meter.add(100)
    assert meter.rates() == {"tokens_per_second": 100.0, "mfu": 0.5}
    assert "mfu" not in Throughput(clock=clock).rates()
