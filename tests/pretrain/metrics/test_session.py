"""metrics.jsonl, throughput, and the object that puts them together."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.metrics.file import FILE_NAME, MetricsFile, read_metrics
from pretrain.metrics.session import Metrics
from pretrain.metrics.throughput import Throughput


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rows_are_written_at_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    file.append(1, {"train_loss": torch.tensor(2.5), "grad_norm": np.float32(0.5), "lr/base": 1e-3})
    assert json.loads(path.read_text()) == {"step": 1, "train_loss": 2.5, "grad_norm": 0.5, "lr/base": 1e-3}
    file.append(2, {"train_loss": 2.0})
    file.append(2, {"val_loss": 2.1})
    file.close()
    rows = read_metrics(tmp_path)
    assert rows[1] == {"step": 2, "train_loss": 2.0, "val_loss": 2.1}
    assert [row["step"] for row in rows] == [1, 2]


def test_non_finite_numbers_leave_valid_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / FILE_NAME)
    file.append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_resume_drops_rows_of_the_lost_future(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    for step in range(1, 8):
        file.append(step, {"train_loss": float(step)})
    with path.open("a") as half:
        half.write('{"step": 8, "train_l')
    assert file.truncate_after(5) == 3
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    file.append(6, {"train_loss": 6.5})
    assert read_metrics(path)[-1] == {"step": 6, "train_loss": 6.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE_NAME]
    untouched = path.stat().st_mtime_ns
    assert file.truncate_after(6) == 0
    assert path.stat().st_mtime_ns == untouched
    assert MetricsFile(tmp_path / "absent").truncate_after(0) == 0


def test_appending_after_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('{"step": 1}\n{"step": 2, "tr')
    file = MetricsFile(path)
    file.append(2, {"train_loss": 1.0})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "train_loss": 1.0}\n'


def test_lines_that_are_no_row_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b'[1]\n{"step": "x"}\n\xff\xfe\n\n{"step": 3}\n{"loss": 1}\n')
    assert read_metrics(path) == [{"step": 3}]
    assert MetricsFile(path).truncate_after(3) == 4
    assert path.read_text() == '{"step": 3}\n'


def test_full_disk_is_said_once_and_does_not_spoil_later_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    file = MetricsFile(tmp_path / FILE_NAME, report=said.append)
    file.append(1, {})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    file.append(2, {})
    file.append(3, {})
    monkeypatch.setattr(os, "write", write)
    file.append(4, {})
    assert len(said) == 1 and "No space left" in said[0]
    assert (tmp_path / FILE_NAME).read_text() == '{"step": 1}\n{"step": 4}\n'


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
            clock.now += 20
            with meter.pause():
                clock.now += 5
    assert meter.rates() == {"tokens_per_second": 100.0, "mfu": 0.25}
    assert meter.seconds == 52
    for _ in range(3):  # the window slides: only the last three steps count
        clock.now += 2
        meter.add(100)
    assert meter.rates()["tokens_per_second"] == 50
    assert "mfu" not in Throughput(clock=clock).rates()


def test_metrics_put_everything_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MetricsFile(tmp_path / FILE_NAME).append(3, {"train_loss": 9.0})
    with Metrics(tmp_path, total_steps=4, start_step=2, wandb="disabled") as metrics:
        metrics.log(3, {"train_loss": torch.tensor(1.5)})
        with metrics.pause():
            metrics.message("saved a checkpoint")
        metrics.log(4, {"val_loss": 1.25})
    assert read_metrics(tmp_path) == [{"step": 3, "train_loss": 1.5}, {"step": 4, "val_loss": 1.25}]
    out = capsys.readouterr().out
    assert "saved a checkpoint\n" in out
    assert "step 4/4 | loss 1.5000 | val loss 1.2500" in out
    assert not (tmp_path / "wandb").exists()


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(tmp_path, total_steps=4, main=False) as metrics, metrics.pause():
        metrics.throughput.add(5)
        metrics.log(1, {"val_loss": 1.0})
        metrics.message("not here")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
