"""Runs that were trained by real ranks, for tests of what is done with them."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.run_config import RunConfig
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session


def trained(data: Path, runs: Path, name: str, *more: str, ranks: int = 2, stage: int = 3) -> RunConfig:
    """Train twelve steps on real ranks; the run's configuration."""
    run = nano_run(data, runs, "--name", name, *more)
    assert run_distributed(session, ranks, run, stage, timeout=300)[0][1] is None
    return run
