"""Named parameter groups, the AdamW that steps them, and their learning rate and weight decay at every step.

A group's name says what is in it: ``base/decay``, ``base/no_decay``, and for each rule ``RULE/decay`` and
``RULE/no_decay``. The schedule, the logs and the checkpoints identify groups by name, not by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from model.config import ModelConfig
from model.parameters import ParameterRole, parameter_roles, parameter_specs
from model.transformer import Transformer
from pretrain.config.lr_rules import BASE, LearningRateRule, match_rules, parse_rules
from pretrain.config.run_config import OptimizerConfig, RunConfig
from pretrain.optim.schedule import LearningRateSchedule, RuleSchedule


def decays(role: ParameterRole, config: OptimizerConfig) -> bool:
    """Whether a parameter of this role is decayed: matrices always, embeddings when asked, nothing else."""
    return role.kind == "matrix" or (role.kind == "embedding" and config.decay_embeddings)


@dataclass(frozen=True)
class Group:
    """The description of one optimizer group, known before a model or an engine exists."""

    name: str
    """``RULE/decay`` or ``RULE/no_decay``; ``base`` stands for no rule. With depth_decay
    ``RULE/layer_7/decay``."""
    decays: bool
    """Whether its parameters are decayed."""
    rule: LearningRateRule | None
    """The rule that multiplies the base learning rate; None for no rule."""
    depth: int
    """With depth_decay: how many layers above the rule's lowest one; else 0."""
    parameters: tuple[str, ...]
    """Names, in the model's order."""


def plan_groups(
    roles: Mapping[str, ParameterRole],
    config: OptimizerConfig,
    rules: Sequence[LearningRateRule],
    layers: int,
) -> list[Group]:
    """Sort parameters into groups by their role, never by their shape (under ZeRO-3 every shape is flat).

    Args:
        roles: every parameter's role by its name, in the model's order.
        config: which kinds are decayed.
        rules: the first that matches a parameter is its rule.
        layers: number of layers of the model.

    Returns:
        Non-empty groups in a fixed order, the same on every rank: base first, then the rules in their order;
        decayed parameters first.

    Raises:
        UserError: a rule that matches nothing, is hidden by others, or names layers outside the model.
    """
    matched = match_rules(rules, roles, layers)
    lowest = {rule.name: min(rule.layer_set(layers) or {0}) for rule in rules}
    members: dict[tuple[int, int, bool], list[str]] = {}
    order: list[LearningRateRule | None] = [None, *rules]
    for name, role in roles.items():
        rule = matched[name]
        depth = 0
        if rule is not None and rule.depth_decay != 1 and role.layer is not None:
            depth = role.layer - lowest[rule.name]
        members.setdefault((order.index(rule), depth, not decays(role, config)), []).append(name)
    groups = []
    for (place, depth, undecayed), names in sorted(members.items()):
        rule = order[place]
        prefix = BASE if rule is None else rule.name
        if rule is not None and rule.depth_decay != 1:
            prefix += f"/layer_{lowest[rule.name] + depth}"
        suffix = "no_decay" if undecayed else "decay"
        groups.append(Group(f"{prefix}/{suffix}", not undecayed, rule, depth, tuple(names)))
    return groups


def run_groups(run: RunConfig, model: ModelConfig) -> list[Group]:
    """Plan the optimizer groups of a run. No memory is allocated for its model.

    Raises:
        UserError: as plan_groups.
    """
    roles = {name: spec.role for name, spec in parameter_specs(model).items()}
    return plan_groups(roles, run.optimizer, parse_rules(run.lr_rules), model.num_layers)


def parameter_groups(
    model: Transformer, config: OptimizerConfig, rules: Sequence[LearningRateRule] = ()
) -> list[dict[str, Any]]:
    """Return the groups of plan_groups with the model's parameters, in the form that an optimizer takes.

    Returns:
        ``name``, ``params`` (in the model's order), ``parameter_names``, ``lr`` and ``weight_decay`` of each.

    Raises:
        UserError: as plan_groups.
    """
    parameters = dict(model.named_parameters())
    return [
        {
            "name": group.name,
            "params": [parameters[name] for name in group.parameters],
            "parameter_names": list(group.parameters),
            "lr": config.learning_rate,
            "weight_decay": config.weight_decay if group.decays else 0.0,
        }
        for group in plan_groups(parameter_roles(model), config, rules, model.config.num_layers)
    ]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, offload: bool
) -> torch.optim.Optimizer:
    """Build AdamW over *groups*: torch's fused kernel, or DeepSpeedCPUAdam when the optimizer state lives on
    the host.

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


class GroupRates:
    """Learning rate and weight decay of every group at every step.

    lr(group, step) = peak x base schedule(step) x factor of its rule(step). The update of AdamW subtracts
    lr x weight_decay x weight (Loshchilov & Hutter 2019, algorithm 2), so a rule slows the decay down as
    well; ``decay_with_lr: false`` divides the factor out again.

    Args:
        groups: the groups, as run_groups returns them.
        run: peak, schedule, weight decay and number of steps.

    Raises:
        UserError: a length does not fit into the run.
    """

    def __init__(self, groups: Sequence[Group], run: RunConfig) -> None:
        self.groups = {group.name: group for group in groups}
        self.base = LearningRateSchedule(run.schedule, run.steps)
        self.config = run.optimizer
        self.rules = {rule.name: RuleSchedule(rule, run.steps) for rule in parse_rules(run.lr_rules)}

    def at(
        self, name: str, step: int, decided: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[float, float]:
        """Learning rate and weight decay of the group *name* at the 0-based *step*.

        Args:
            decided: rule -> the step at which it was released by maturity, for the rules where that has
                happened.
        """
        group = self.groups[name]
        rate = self.config.learning_rate * self.base.factor(step)
        decay = self.config.weight_decay if group.decays else 0.0
        if group.rule is None:
            return rate, decay
        rule = group.rule
        factor = self.rules[rule.name].factor(step, group.depth, decided.get(rule.name))
        return rate * factor, decay if rule.decay_with_lr else decay / factor

    def write(
        self, optimizer: Any, step: int, decided: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, float]:
        """Write the values of *step* into the optimizer's groups, which are found by name.

        Returns:
            Group name -> learning rate.
        """
        rates = {}
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.at(group["name"], step, decided)
            rates[group["name"]] = group["lr"]
        return rates
