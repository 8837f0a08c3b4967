"""A whole training session inside a test worker, on the small corpus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.errors import UserError
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.engine.patches import prepare_deepspeed
from pretrain.metrics.file import read_metrics
from pretrain.metrics.session import Metrics
from pretrain.run.data import open_data
from pretrain.runtime.world import World, single_world, start_world
from pretrain.session import build_session
from pretrain.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
# Figures that differ from run to run, because they are times.
TIMES = {"seconds", "tokens_per_second", "mfu"}


def nano_arguments(data: Path, runs: Path, *more: str) -> list[str]:
    """Arguments of a run of a few seconds: 8 sequences of 64 tokens a step, 12 steps."""
    defaults = {
        "model": "prism-nano",
        "data": data,
        "runs_dir": runs,
        "name": "nano",
        "steps": 12,
        "global_batch_tokens": 512,
        "micro_batch": 2,
        "precision": "fp32",
        "optimizer.learning_rate": "1e-3",
        "validation.every": 4,
        "validation.sequences": 10,
        "checkpoint.every": 4,
        # Whether a checkpoint that is written beside the training is there when a run stops dead is a matter of luck.
        "checkpoint.background": "false",
        "logging.every": 3,
        "logging.wandb": "disabled",
    }
    flags = [
        part
        for name, value in defaults.items()
        if f"--{name}" not in more
        for part in (f"--{name}", str(value))
    ]
    return [*flags, *more]


def nano_run(data: Path, runs: Path, *more: str) -> RunConfig:
    """The RunConfig of nano_arguments."""
    return parse_command_line(nano_arguments(data, runs, *more)).run


def session(run: RunConfig, stage: int = 2, **changes: Any) -> tuple[list[str], str | None]:
    """Train *run* in this worker to its end.

    Returns:
        The notes of a resume, and the line of the UserError that ended the session, if one did.
    """
    run = replace(run, **changes)
    prepare_deepspeed()
    try:
        world = start_world(None, False, run.tensor_parallel, run.sequence_parallel)
        session = build_session(
            run,
            read_ds_config(str(ROOT / f"ds_configs/zero{stage}.json")),
            open_data(run, lambda progress: None),
            world,
        )
        if not session.finished:
            with Metrics(
                run.folder,
                total_steps=run.steps,
                start_step=session.state.step,
                main=world.is_main,
                wandb="disabled",
            ) as metrics:
                Trainer(session, metrics).fit()
    except UserError as error:
        return [], str(error)
    return session.notes, None


def interrupted(session_run: RunConfig, steps: int, ranks: int, stage: int) -> str | None:
    """Like session, but the trainer stops dead after *steps* steps, as if its machine had gone."""
    original = Trainer._count

    def stop(self: Trainer, applied: bool) -> None:
        if self.state.step == steps:
            raise KeyboardInterrupt
        original(self, applied)

    Trainer._count = stop  # type: ignore[method-assign]
    try:
        session(session_run, stage)
    except KeyboardInterrupt:
        return "stopped"
    finally:
        Trainer._count = original  # type: ignore[method-assign]
    return None


def curve(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics without the times: equal rows mean bit-identical numbers."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(folder)]


def alone() -> World:
    """A world of one process, without a process group."""
    return single_world(torch.device("cpu"))
