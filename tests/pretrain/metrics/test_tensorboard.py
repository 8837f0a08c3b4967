"""Event files, read with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pretrain.assembly.preflight import check_start
from pretrain.metrics.metrics import Metrics
from pretrain.metrics.tracking import FOLDER, TensorBoardLogger
from tests.helpers.refusals import refused
from tests.helpers.training import nano_run

installed = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Value by step, of all sessions together."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / FOLDER))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


@installed
def test_sessions_make_one_curve(tmp_path: Path) -> None:
    with Metrics(tmp_path, total_steps=5, mode="disabled", tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"train_loss": 5.0 - step, "tokens": 8 * step, "note": "text", "heads": [2, 4]})
    with Metrics(tmp_path, total_steps=5, start_step=2, mode="disabled", tensorboard=True) as metrics:
        metrics.log(3, {"train_loss": 1.5})
        metrics.log(3, {"val_loss": 1.75})
    assert scalars(tmp_path, "train_loss") == {1: 4.0, 2: 3.0, 3: 1.5}  # step 3 was lost and repeated
    assert scalars(tmp_path, "val_loss") == {3: 1.75}


@installed
def test_a_failure_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    logger = TensorBoardLogger(tmp_path, 1, said.append)

    class Broken:
        def add_scalar(self, *values: object) -> None:
            raise OSError("no space left")

    logger._writer = Broken()
    for step in (1, 2):
        logger.log(step, {"train_loss": 1.0})
    logger.close()
    assert len(said) == 1 and "no space left" in said[0] and "metrics.jsonl has everything" in said[0]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    said: list[str] = []
    TensorBoardLogger(tmp_path, 1, said.append).log(1, {"train_loss": 1.0})
    assert len(said) == 1 and said[0].startswith("tensorboard")


def test_without_the_library_a_run_is_refused(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = nano_run(small_folder, tmp_path, "--logging.tensorboard true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("tensorboard: not installed; pip install 'head-schedules[tensorboard]', or leave it out"):
        check_start(run)
