"""Runs that were trained by real ranks, for tests of what is done with them; the command that exports
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.parameters import has_vocabulary_rows
from model.transformer import Transformer
from pretrain import convert
from pretrain.config.run_config import RunConfig
from pretrain.hf.export_folder import write_description
from pretrain.hf.formats import Export, plan_export
from pretrain.hf.safetensors_writer import write_weights
from tests.helpers.distributed import run_distributed
from tests.helpers.refusals import refusal
from tests.helpers.training import nano_run, session


def trained(data: Path, runs: Path, name: str, *more: str, ranks: int = 2, stage: int = 3) -> RunConfig:
    """Train twelve steps on real ranks; the run's configuration."""
    run = nano_run(data, runs, "--name", name, *more)
    assert run_distributed(session, ranks, run, stage, timeout=300)[0][1] is None
    return run


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that pretrain.convert with bad input prints."""
    return refusal(capsys, convert.main, *arguments)


def export_of(ours: Transformer, chosen: Any = "native") -> Export:
    """How the network is exported."""
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    return plan_export(ours.config, chosen, ids, torch.float32)


def weights_of(ours: Transformer) -> Any:
    """Parameters by name, as the writer asks for them."""
    parameters = dict(ours.named_parameters())
    rows = ours.config.vocab_size
    return lambda name: parameters[name].detach()[: rows if has_vocabulary_rows(name) else None].float()


def write_folder(ours: Transformer, folder: Path, chosen: Any = "native") -> Path:
    """An exported folder without a tokenizer."""
    export = export_of(ours, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, export.tensors, weights_of(ours), torch.float32)
    write_description(folder, export, 1)
    return folder
