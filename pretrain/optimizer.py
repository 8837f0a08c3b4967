"""Named parameter groups and the AdamW that steps them.

A group's name says everything that matters about it: ``base/decay`` and ``base/no_decay``. Names, not positions, are
what the schedule, the logs and the checkpoints go by.
"""

from __future__ import annotations

from typing import Any

import torch

from model.roles import ParameterRole, parameter_roles
from model.transformer import Transformer
from pretrain.config import OptimizerConfig
from pretrain.schedule import LearningRateSchedule


def decays(role: ParameterRole, config: OptimizerConfig) -> bool:
    """Whether a parameter of this role is decayed: matrices always, embeddings when asked, nothing else."""
    return role.kind == "matrix" or (role.kind == "embedding" and config.decay_embeddings)


def parameter_groups(model: Transformer, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Sort the parameters into named groups by their role, never by their shape (under ZeRO-3 every shape is flat).

    Returns:
        Non-empty groups in a fixed order, the same on every rank: ``name``, ``params`` (in the model's order),
        ``parameter_names``, ``lr`` and ``weight_decay``.
    """
    roles = parameter_roles(model)
    groups: dict[str, dict[str, Any]] = {}
    for name in ("base/decay", "base/no_decay"):
        groups[name] = {
            "name": name,
            "params": [],
            "parameter_names": [],
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay if name.endswith("/decay") else 0.0,
        }
    for name, parameter in model.named_parameters():
        group = groups["base/decay" if decays(roles[name], config) else "base/no_decay"]
        group["params"].append(parameter)
        group["parameter_names"].append(name)
    return [group for group in groups.values() if group["params"]]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, offload: bool
) -> torch.optim.Optimizer:
    """AdamW over *groups*: torch's fused kernel, or DeepSpeedCPUAdam when the optimizer state lives on the host.

    DeepSpeedCPUAdam is compiled at its first use (about a minute; it needs g++ and ninja).
    """
    arguments: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": 0.0,
    }
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **arguments)
    return torch.optim.AdamW(groups, fused=True, **arguments)


def set_learning_rates(
    optimizer: Any, schedule: LearningRateSchedule, peak: float, step: int
) -> dict[str, float]:
    """Write the learning rates of the 0-based *step* into the optimizer's groups.

    Returns:
        Group name -> learning rate.
    """
    rates = {}
    for group in optimizer.param_groups:
        group["lr"] = peak * schedule.factor(step)
        rates[group["name"]] = group["lr"]
    return rates
