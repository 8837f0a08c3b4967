"""Runs that were trained by real ranks, for tests of what is done with them; the command that exports
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.transformer import Transformer
from pretrain import convert
from pretrain.config.run_config import RunConfig
from pretrain.hf.export_folder import list_parameters, special_ids, write_description, write_weights
from pretrain.hf.formats import PADDED, fold_divisor, folder_config, folder_weights
from pretrain.hf.padding import folded_model
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refusal
from tests.helpers.training import nano_run, session


def trained(data: Path, runs: Path, name: str, *more: str, ranks: int = 2, stage: int = 3) -> RunConfig:
    """Train twelve steps on real ranks; the run's configuration."""
    run = nano_run(data, runs, "--name", name, *more)
    failure = run_distributed(session, ranks, run, stage, timeout=300)[0][1]
    assert failure is None, failure
    return run


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one-line error of pretrain.convert for bad input."""
    return refusal(capsys, convert.main, *arguments)


def write_folder(ours: Transformer, folder: Path, chosen: Any = "native") -> Path:
    """An exported folder without a tokenizer."""
    model, parameters = ours.config, list_parameters(ours)
    if chosen in PADDED:
        model, parameters = folded_model(model), fold_divisor(parameters, model.width_ratio)
    config = folder_config(model, chosen, special_ids(1) | {"dtype": torch.float32})
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, folder_weights(model, chosen, parameters), torch.float32)
    write_description(folder, config)
    return folder
