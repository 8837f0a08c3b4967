"""Builds the metrics of a session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig
from pretrain.config.run_config import RunConfig, split_run_name
from pretrain.metrics.file import last_step
from pretrain.metrics.metrics import Metrics
from pretrain.runtime.hardware import MEASURED, peak_flops
from pretrain.runtime.world import World
from pretrain.utils.format import log_line


def build_metrics(
    run: RunConfig,
    world: World,
    step: int,
    model: ModelConfig,
    decisions: Mapping[str, Any],
    verbose: bool = False,
) -> Metrics:
    """Build the metrics of a session, with MFU against the peak of all devices together. Collective.

    Args:
        step: at which the session begins.
        decisions: of Decisions.to_dict.
        verbose: print how MFU is computed.

    Raises:
        UserError: the run's metrics.jsonl is not a file that can be read.
    """
    flops, dtype = model.flops_per_token(), decisions["dtype"]["value"]
    peak = None
    # A file that cannot be read is rejected by all ranks at once.
    world.on_rank_zero(lambda: last_step(run.folder))
    if world.is_main:
        per_device, source = peak_flops(world.device, torch.bfloat16 if dtype == "bf16" else torch.float32)
        peak = per_device * world.size
        if verbose:
            world.print_rank_zero(describe_mfu(flops, peak, source))
    study, variant = _study(run), split_run_name(run.run_name)[0]
    return Metrics(
        run.folder,
        total_steps=run.steps,
        start_step=step,
        main=world.is_main,
        flops_per_token=flops,
        peak_flops=peak,
        every_seconds=run.logging.seconds,
        tensorboard=run.logging.tensorboard,
        mode=run.logging.wandb,
        project=run.logging.wandb_project,
        config={"run": run.to_dict(), "model": model.to_json(), "decisions": decisions},
        group=study or variant,
        tags=[
            *([variant] if study else []),
            run.model_name,
            f"zero{decisions['ds_config']['value']['zero_optimization']['stage']}",
            dtype,
        ],
    )


def _study(run: RunConfig) -> str | None:
    """The name of the study that a run is part of; pilots have that of their study in front."""
    folder = Path(run.runs_dir).resolve()
    if not (folder / "study.yaml").is_file():
        return None
    pilots = (folder.parent / "study.yaml").is_file()
    return f"{folder.parent.name}-{folder.name}" if pilots else folder.name


def describe_mfu(flops: float, peak: float, source: str) -> str:
    """What MFU refers to, and whether it compares with that of another session."""
    text = (
        f"= tokens/s x {flops / 1e6:,.1f} MFLOP per token (6 N_matmul + 12 sum min(T, window) A) / "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})"
    )
    if source.startswith(MEASURED):
        text += "; every session measures the peak again: compare tokens/s between sessions, not MFU"
    return log_line("MFU", text)
