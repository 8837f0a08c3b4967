"""A whole training session inside a test worker, on the small corpus."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from model.config import ModelConfig
from model.errors import UserError
from pretrain.assembly.open_run import open_run
from pretrain.config.command_line import parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.engine.build import build_engine, build_network, build_run_optimizer
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.metrics.file import read_metrics
from pretrain.runtime.signals import StopListener
from pretrain.runtime.world import World, single_world
from pretrain.trainer import Trainer
from tests.helpers.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
# Measuring the device's peak takes a second.
LIGHT = mock.patch("pretrain.metrics.build.peak_flops", lambda *_: (1e12, "not measured"))
# Metrics that differ from run to run, because they are times.
TIMES = {"seconds", "tokens_per_second", "mfu"}


def nano_arguments(data: Path, runs: Path, *more: str) -> list[str]:
    """Arguments of a run of a few seconds with AdamW: 8 sequences of 64 tokens a step, 12 steps.

    Args:
        more: further flags and values, one by one or as a line: "--steps 3 --precision bf16".
    """
    given = [part for text in more for part in (shlex.split(text) if text.startswith("--") else [text])]
    defaults = {
        "config": "micro",
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
        # Whether one that is written in the background is there when a run stops dead is a matter of luck.
        "checkpoint.background": "false",
        "logging.every": 3,
        "logging.sample": 0,  # a pass of the network for each token
        "logging.wandb": "disabled",
    }
    kept = [(f"--{name}", str(value)) for name, value in defaults.items() if f"--{name}" not in given]
    return [*(part for flag in kept for part in flag), *given]


def nano_run(data: Path, runs: Path, *more: str) -> RunConfig:
    """The RunConfig of nano_arguments."""
    return parse_command_line(nano_arguments(data, runs, *more)).run


class Opened:
    """A run that is opened in this worker; the attributes of its session are its own."""

    def __init__(self, trainer: Trainer, notes: list[str]) -> None:
        self.trainer, self.notes = trainer, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer.session, name)

    def announce(self, hook: str = "") -> list[str]:
        """What its hooks print before the first step; those of one hook, where it is named."""
        hooks = [each for each in self.trainer.hooks if hook in ("", each.name)]
        return [line for each in hooks for line in each.announce(self.trainer.session)]


_held = contextlib.ExitStack()


def build(run: RunConfig, settings: int | dict[str, Any] = 2, hooks: Sequence[Any] = ()) -> Opened:
    """Open *run*, which may be finished, in this worker, until the next is opened.

    Args:
        settings: the stage of a shipped ds_config, or a ds_config.
    """
    _held.close()
    if isinstance(settings, int):
        settings = read_ds_config(str(ROOT / f"ds_configs/zero{settings}.json"))
    listener = StopListener()
    _held.callback(listener.close)
    # Another worker may be next to open it, while this one waits.
    unlocked = mock.patch("pretrain.assembly.open_run.hold_run_folder")
    with (
        mock.patch("pretrain.assembly.open_run.describe_opening", return_value=[]) as opening,
        LIGHT,
        unlocked,
    ):
        trainer = _held.enter_context(open_run(run, dict(settings), listener, hooks, load_finished=True))
    assert isinstance(trainer, Trainer)
    return Opened(trainer, [] if opening.call_args is None else opening.call_args.args[3])


def fit(opened: Opened) -> Any:
    """Train to the end (or, when the run has all its steps, only load); the engine."""
    return opened.trainer.fit()


def engine_of(
    run: RunConfig, model: ModelConfig, ds_config: dict[str, Any], grid: Any, **kernels: Any
) -> Any:
    """An engine of a run's model, as it is before the first step."""
    network = build_network(run, model, ds_config, grid, **kernels)
    return build_engine(run, network, build_run_optimizer(run, network, ds_config), ds_config, grid)


def session(run: RunConfig, stage: int = 2, **changes: Any) -> tuple[list[str], str | None]:
    """Train *run* in this worker to its end.

    Returns:
        The notes of a resume, and the line of the UserError that ended the session, if one did.
    """
    try:
        built = build(replace(run, **changes), stage)
        fit(built)
    except UserError as error:
        return [], str(error)
    return built.notes, None


def interrupted(session_run: RunConfig, steps: int, ranks: int, stage: int) -> str | None:
    """Like session, but the trainer stops dead after *steps* steps, as if its machine had gone."""
    original = Trainer._count

    def stop(self: Trainer, applied: bool) -> None:
        if self.state.step == steps:
            raise KeyboardInterrupt
        original(self, applied)

    with mock.patch.object(Trainer, "_count", stop):
        try:
            session(session_run, stage)
        except KeyboardInterrupt:
            return "stopped"
    return None


def curve(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics without the times: equal rows mean bit-identical numbers."""
    return [
        {key: value for key, value in row.items() if key not in TIMES and not key.startswith("ranks/")}
        for row in read_metrics(folder)
    ]


def alone() -> World:
    """The World of a single process without a process group."""
    return single_world(torch.device("cpu"))


def refusal_of(run: RunConfig, stage: int = 2) -> str | None:
    """The line of the UserError that ends the session of this worker."""
    return session(run, stage)[1]


def check_refused(run: RunConfig, ranks: int, message: str) -> None:
    """Every rank rejects *run* with *message*, and nothing is written."""
    assert all(message in said for said in run_distributed(refusal_of, ranks, run, timeout=120))
    assert not run.folder.exists() or not list(run.folder.iterdir())


def broken_off(run: RunConfig, *stops: int, ranks: int = 1, stage: int = 2) -> RunConfig:
    """Train *run* without a stop, and again with a dead stop after each of *stops* steps: bit-identical.

    Returns the second run."""
    broken = replace(run, name=f"{run.name}-broken")
    assert run_distributed(session, ranks, run, stage, timeout=200)[0] == ([], None)
    for step in stops:
        assert "stopped" in run_distributed(interrupted, ranks, broken, step, ranks, stage, timeout=200)
    assert run_distributed(session, ranks, broken, stage, timeout=200)[0][1] is None
    assert curve(broken.folder) == curve(run.folder)
    return broken
