"""Scores of a finished run's checkpoint become points of its curves, wherever the run stands by now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from pretrain.checkpoint.state import TrainingState
from pretrain.evaluation.command import _log_to_wandb
from pretrain.metrics import tracking
from pretrain.metrics.file import MetricsFile
from pretrain.run.saved import SavedRun


class Logger:
    """Stands for WandbLogger: what it was made with, and what it was given."""

    made: ClassVar[dict] = {}
    rows: ClassVar[list] = []

    def __init__(self, folder, **settings):
        Logger.made, Logger.rows = {"folder": folder, **settings}, []

    def log(self, step, row):
        Logger.rows.append((step, row))

    def close(self):
        Logger.made["closed"] = True


@pytest.mark.parametrize("newest", [None, 500])
def test_scores_stand_at_the_tokens_of_their_step(tmp_path, monkeypatch, newest):
    state = TrainingState(
        step=100, tokens=4000, run={"logging": {"wandb": "offline", "wandb_project": "mine"}}
    )
    monkeypatch.setattr(tracking, "WandbLogger", Logger)
    monkeypatch.setattr(SavedRun, "open", lambda folder, step, report: SimpleNamespace(state=state))
    if newest is not None:
        file = MetricsFile(tmp_path / "metrics.jsonl")
        for step in (100, newest):
            file.append(step, {"train_loss": 1.0, "tokens": 40 * step})
        file.close()
    options = SimpleNamespace(model=str(tmp_path), wandb="auto")
    _log_to_wandb(options, 100, {"piqa/acc": 0.5})
    assert Logger.rows == [(100, {"tokens": 4000, "evaluation/piqa/acc": 0.5})]
    filed = {"folder": tmp_path, "mode": "offline", "project": "mine"}
    assert Logger.made == {**filed, "newest_step": newest or 100, "closed": True}
