"""Runs that were trained by real ranks, for tests of what is done with them; the command that exports
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain import convert
from pretrain.config.run_config import RunConfig
from tests.helpers.distributed import run_distributed
from tests.helpers.training import nano_run, session


def trained(data: Path, runs: Path, name: str, *more: str, ranks: int = 2, stage: int = 3) -> RunConfig:
    """Train twelve steps on real ranks; the run's configuration."""
    run = nano_run(data, runs, "--name", name, *more)
    assert run_distributed(session, ranks, run, stage, timeout=300)[0][1] is None
    return run


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: object) -> str:
    """The one line that a command with bad input prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that pretrain.convert with bad input prints."""
    return refusal(capsys, convert.main, *arguments)
