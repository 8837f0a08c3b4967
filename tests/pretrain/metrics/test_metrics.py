"""The object that puts file, console and tracking together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.metrics.file import FILE_NAME, MetricsFile, read_metrics
from pretrain.metrics.metrics import Metrics
from pretrain.metrics.step_log import StepLog
from tests.helpers.training import alone


def test_metrics_put_everything_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MetricsFile(tmp_path / FILE_NAME).append(3, {"train_loss": 9.0})
    with Metrics(tmp_path, total_steps=4, start_step=2, mode="disabled") as metrics:
        metrics.log(3, {"train_loss": torch.tensor(1.5)})
        with metrics.pause():
            metrics.message("saved a checkpoint")
        metrics.log(4, {"val_loss": 1.25})
    assert read_metrics(tmp_path) == [{"step": 3, "train_loss": 1.5}, {"step": 4, "val_loss": 1.25}]
    out = capsys.readouterr().out
    assert "saved a checkpoint\n" in out
    assert "step 4/4 | loss 1.5000 | val loss 1.2500" in out
    assert not (tmp_path / "wandb").exists()


def test_the_console_has_the_newest_of_rows_that_are_recorded_together(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, total_steps=9, mode="disabled")
    log, shown = StepLog(metrics, alone(), 64, 0.0), list[int]()
    metrics._console.update = lambda step, row: shown.append(step)  # type: ignore[method-assign,union-attr]
    for step in (1, 2, 3):
        log.add(step, torch.tensor([1.0]), 0.5, {"lr/all": 0.1})
    log.flush({"val_loss": 1.0})
    assert shown == [3] and [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(tmp_path, total_steps=4, main=False) as metrics, metrics.pause():
        metrics.throughput.add(5)
        metrics.log(1, {"val_loss": 1.0})
        metrics.message("not here")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
