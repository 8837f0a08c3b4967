"""Engines of small models, and the batches on which tests of engines train them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig
from model.process_grid import ALONE
from pretrain.config.command_line import parse_command_line
from pretrain.engine.batch import BatchPlan
from pretrain.engine.ds_config import merge_ds_config
from pretrain.engine.patches import prepare_deepspeed
from pretrain.plan.micro_batch import plan_batch
from tests.helpers.training import engine_of

VOCABULARY = 300


def nano_engine(
    ds_config: dict[str, Any],
    *flags: str,
    model: str = "prism-nano",
    precision: str = "fp32",
    tokens: int = 512,
    micro_batch: int = 2,
) -> tuple[Any, ModelConfig, BatchPlan]:
    """An engine on the ranks of this process group, its model and its batch plan.

    Args:
        ds_config: as read_ds_config returns it.
        tokens: in a step.
    """
    import deepspeed

    prepare_deepspeed()
    deepspeed.init_distributed("gloo")  # stage 3 asks it for the number of ranks before there is an engine
    given = [
        "--config",
        "micro",
        "--model",
        model,
        "--global_batch_tokens",
        str(tokens),
        "--precision",
        precision,
        *flags,
    ]
    run = parse_command_line(given).run
    config = run.build_model_config(VOCABULARY)
    plan = plan_batch(tokens, micro_batch, config, dist.get_world_size(), 1 << 30, "cpu")
    merged = merge_ds_config(ds_config, run, plan, precision == "bf16", config)
    return engine_of(run, config, merged, ALONE), config, plan


def batches(config: ModelConfig, plan: BatchPlan, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step, this rank's micro-batches of inputs and labels: together the same on any number of
    ranks."""
    shape = (steps, plan.sequences, config.context_length + 1)
    data = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(5))
    for step in data:
        shares = step.split(plan.micro_batch)[dist.get_rank() :: dist.get_world_size()]
        yield [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in shares]


def set_rate(engine: Any, rate: float = 3e-4) -> None:
    """Give all groups of the optimizer one learning rate, as the trainer does before each step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
