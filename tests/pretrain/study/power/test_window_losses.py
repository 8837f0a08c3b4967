"""What single windows say of the spread between seeds, and their losses against the model's own."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.initialization import initialize
from model.presets import preset
from model.transformer import Transformer
from pretrain.metrics.file import read_metrics
from pretrain.study.power import window_losses
from pretrain.study.power.window_losses import WindowVariance, variances
from pretrain.study.results import RunResult
from pretrain.study.statistics import pooled_sd
from pretrain.study.study_file import PlannedRun
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session


def tables(generator, count, seeds, windows, seed_sd=0.05, common=0.3, own=0.2):
    """Paired differences [count, seeds, windows] with what the module's docstring says is in them."""
    return (
        generator.normal(0, seed_sd, (count, seeds, 1))
        + generator.normal(0, common, (count, 1, windows))
        + generator.normal(0, own, (count, seeds, windows))
    )


def test_variances_of_planted_tables():
    generator = np.random.default_rng(0)
    own, common = variances(tables(generator, 20, 3, 400))
    assert own == pytest.approx(0.2**2, rel=0.03) and common == pytest.approx(0.3**2, rel=0.05)
    assert all(map(math.isnan, variances([np.zeros((1, 5))])))


def test_the_spread_with_more_windows_is_what_was_said():
    generator = np.random.default_rng(1)
    spreads = {
        times: pooled_sd(tables(generator, 4000, 3, 32 * times).mean(2).tolist()) for times in (1, 4, 16)
    }
    found = WindowVariance(*variances(tables(generator, 100, 3, 32)), 32, 32, "a test")
    for times in (4, 16):
        assert found.sd(spreads[1], times) == pytest.approx(spreads[times], rel=0.04)  # three standard errors
    means = tables(generator, 1000, 200, 32).mean((1, 2))
    assert np.std(means) == pytest.approx(found.text_error, rel=0.1), "what no number of seeds reduces"


def result(run):
    return RunResult(PlannedRun("", "a", 1, run), Path(run.folder), "finished", [])


def test_losses_are_those_of_the_model(monkeypatch, tmp_path):
    network = Transformer(preset("prism-nano")).eval()
    initialize(network, 1)
    tokens = np.random.default_rng(3).integers(0, network.config.vocab_size, (5, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    asked = []

    class Saved:
        @staticmethod
        def open(folder, step):
            asked.append((folder, step))
            return SimpleNamespace(load_model=lambda: network)

    monkeypatch.setattr(window_losses, "SavedRun", Saved)
    monkeypatch.setattr(window_losses, "held_out", lambda source, count: (inputs, labels, None, "a test"))
    run = nano_run(tmp_path, tmp_path, "--steps", "7")
    found_inputs, losses, text = window_losses._losses(result(run), 5, lambda done, passes: None)
    with torch.no_grad():
        expected = [
            network(torch.from_numpy(row)[None], torch.from_numpy(label)[None]).item()
            for row, label in zip(inputs, labels, strict=True)
        ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)  # fp32, in another order
    assert asked == [(run.folder, 7)] and text == "a test" and (found_inputs == inputs).all()


@pytest.mark.slow
def test_window_losses_of_a_run_are_its_validation_loss(small_folder, tmp_path):
    run = nano_run(small_folder, tmp_path, "--steps", "2", "--validation.sequences", "6")
    assert run_distributed(session, 1, run, timeout=120)[0][1] is None
    rows = read_metrics(run.folder)
    done = []
    inputs, losses, text = window_losses._losses(result(run), 6, lambda *counts: done.append(counts))
    assert inputs.shape[0] == len(losses) == 6 and np.std(losses) > 0
    assert losses.mean() == pytest.approx(rows[-1]["val_loss"], rel=1e-6), "fp32, in batches of another size"
    assert "held-out text" in text and done[-1][0] == done[-1][1]
