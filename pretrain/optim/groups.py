"""Named parameter groups, the optimizer that steps them, and their rate and weight decay at every step.

A group's name says what is in it: ``base/decay``, ``base/no_decay``, and for each rule ``RULE/decay`` and
``RULE/no_decay``; the blocks' matrices are in ``base/muon`` and ``RULE/muon`` with Muon, in ``base/hidden``
and ``RULE/hidden`` with AdamW and parametrization mup, with ``block_width`` in ``base/width_96/hidden`` and
so on. The schedule, the logs and the checkpoints identify groups by name, not by position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.parameters import ParameterRole, is_hidden, parameter_roles, parameter_specs, takes_muon
from model.transformer import Transformer
from pretrain.config.lr_rules import BASE, LearningRateRule, match_rules
from pretrain.config.run_config import RunConfig
from pretrain.config.sections import MuonConfig, MuonScale, OptimizerConfig
from pretrain.optim.muon import MuonAndAdamW
from pretrain.optim.schedule import LearningRateSchedule, RuleSchedule


def decays(role: ParameterRole, config: OptimizerConfig) -> bool:
    """Whether a parameter of this role is decayed: matrices always, embeddings when asked, nothing else."""
    return role.kind == "matrix" or (role.kind == "embedding" and config.decay_embeddings)


SUFFIXES = ("muon", "hidden", "decay", "no_decay")
LEAST_SHARE = 1e-5
"""Of its rate that depth_decay may leave a layer whose decay is divided by it."""


def group_suffix(role: ParameterRole, config: OptimizerConfig, model: ModelConfig) -> str:
    """The end of the name of a parameter's group, one of SUFFIXES."""
    if takes_muon(role) and config.kind == "muon":
        return "muon"
    if is_hidden(role) and model.parametrization == "mup":
        return "hidden"
    return "decay" if decays(role, config) else "no_decay"


def width_factor(suffix: str, ratio: float, scale: MuonScale) -> float:
    """The factor of a group's learning rate with parametrization mup; 1 without it.

    *ratio* is m of its matrices, the width of their layers over base_width.

    A matrix of the blocks is to change its outputs by as much at every width: the spectral norm of its
    update, times its rate, goes as sqrt(outputs / inputs) (arXiv 2310.17813). Between models of the same
    layers, head counts and ratios of widths that is constant, and so is the norm of Muon's update sized
    ``spectral`` or ``unit``. That of ``rms`` grows as the root of the width, that of AdamW's, whose entries
    are about 1 and correlated, as the width (arXiv 2203.03466, table 8).
    """
    if suffix == "hidden":
        return 1 / ratio
    return 1 / math.sqrt(ratio) if suffix == "muon" and scale == "rms" else 1.0


@dataclass(frozen=True)
class Group:
    """The description of one optimizer group, known before a model or an engine exists."""

    name: str
    """``RULE/`` and the suffix; ``base`` stands for no rule. With depth_decay
    ``RULE/layer_7/decay``."""
    suffix: str
    """The last part of its name."""
    rule: LearningRateRule | None
    """The rule that multiplies the base learning rate; None for no rule."""
    depth: int
    """With depth_decay: how many layers above the rule's lowest one; else 0."""
    parameters: tuple[str, ...]
    """Names, in the model's order."""
    width_factor: float = 1.0
    """Factor of the learning rate, see width_factor; not of the decay."""
    separate: bool = False
    """Whether it is one matrix, whose rate follows its spectrum."""

    @property
    def decays(self) -> bool:
        """Whether its parameters are decayed."""
        return self.suffix != "no_decay"


def plan_groups(
    roles: Mapping[str, ParameterRole],
    config: OptimizerConfig,
    rules: Sequence[LearningRateRule],
    model: ModelConfig,
    scale: MuonScale = "rms",
    separate: bool = False,
) -> list[Group]:
    """Sort parameters into groups by their role, never by their shape (under ZeRO-3 every shape is flat).

    Args:
        roles: every parameter's role by its name, in the model's order.
        config: which kinds are decayed, and whether Muon steps some.
        rules: the first that matches a parameter is its rule.
        scale: of Muon's updates.
        separate: whether every matrix and embedding has a separate group, such as
            ``base/layers.0.attention.q/muon``.

    Returns:
        Non-empty groups in a fixed order, the same on every rank: base first, then the rules in their order;
        in the order of SUFFIXES.

    Raises:
        UserError: a rule that matches nothing, is hidden by others, or names layers outside the model.
    """
    layers = model.num_layers
    matched = match_rules(rules, roles, layers)
    lowest: dict[str, int] = {}
    for name, role in roles.items():
        if (rule := matched[name]) is not None and role.layer is not None:
            lowest[rule.name] = min(role.layer, lowest.get(rule.name, role.layer))
    members: dict[tuple[int, int, int, int, int], list[str]] = {}
    order: list[LearningRateRule | None] = [None, *rules]
    for index, (name, role) in enumerate(roles.items(), start=1):
        rule = matched[name]
        depth = 0
        if rule is not None and rule.depth_decay != 1 and role.layer is not None:
            depth = role.layer - lowest[rule.name]
        kind, width = SUFFIXES.index(group_suffix(role, config, model)), 0
        if model.parametrization == "mup" and is_hidden(role) and role.layer is not None:
            width = model.layer_width(role.layer)
        own = index if separate and role.kind in ("matrix", "embedding") else 0
        members.setdefault((order.index(rule), depth, kind, width, own), []).append(name)
    groups = []
    for (place, depth, kind, width, own), names in sorted(members.items()):
        rule = order[place]
        prefix = BASE if rule is None else rule.name
        if rule is not None and rule.depth_decay != 1:
            prefix += f"/layer_{lowest[rule.name] + depth}"
        if width and isinstance(model.block_width, tuple):
            prefix += f"/width_{width}"
        if own:
            prefix += f"/{names[0].removesuffix('.weight')}"
        suffix = SUFFIXES[kind]
        factor = width_factor(suffix, width / (model.base_width or 1) if width else 1.0, scale)
        groups.append(Group(f"{prefix}/{suffix}", suffix, rule, depth, tuple(names), factor, own > 0))
    return groups


def run_groups(run: RunConfig, model: ModelConfig) -> list[Group]:
    """Plan the optimizer groups of a run. No memory is allocated for its model.

    Raises:
        UserError: as plan_groups.
    """
    roles = {name: spec.role for name, spec in parameter_specs(model).items()}
    return plan_groups(roles, run.optimizer, run.lr_rules, model, run.muon.scale, run.llr.active)


def parameter_groups(
    model: Transformer,
    config: OptimizerConfig,
    rules: Sequence[LearningRateRule] = (),
    separate: bool = False,
) -> list[dict[str, Any]]:
    """Return the groups of plan_groups with the model's parameters, in the form that an optimizer takes.

    Returns:
        ``name``, ``params`` (in the model's order), ``parameter_names``, ``lr`` and ``weight_decay`` of each,
        and with Muon ``kind`` (muon or adamw).

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
        | ({"kind": "muon" if group.suffix == "muon" else "adamw"} if config.kind == "muon" else {})
        for group in plan_groups(parameter_roles(model), config, rules, model.config, separate=separate)
    ]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, offload: bool, muon: MuonConfig | None = None
) -> torch.optim.Optimizer:
    """Build AdamW over *groups*: torch's fused kernel, or DeepSpeedCPUAdam when the optimizer state lives on
    the host. With kind muon, in both cases torch's AdamW together with Muon, which has the settings *muon*.

    DeepSpeedCPUAdam is compiled at its first use (about a minute; it needs g++ and ninja).
    """
    arguments: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": 0.0,
    }
    if config.kind == "muon":
        return MuonAndAdamW(groups, muon or MuonConfig(), **arguments)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **arguments)
    return torch.optim.AdamW(groups, fused=True, **arguments)


class GroupRates:
    """Learning rate and weight decay of every group at every step.

    lr(group, step) = peak x base schedule(step) x factor of its rule(step) x width_factor x its factor in
    ``factors``. Muon's groups may have a separate peak. Both updates subtract lr x weight_decay x weight
    (Loshchilov & Hutter 2019, algorithm 2), so a rule also slows the decay; ``decay_with_lr: false`` divides
    the factor out again. width_factor is always divided out: the decay does not depend on the width.

    Args:
        groups: the groups, as run_groups returns them.
        run: peak, schedule, weight decay and number of steps.

    Raises:
        UserError: a length does not fit into the run, or a rule leaves a layer next to nothing of its rate
            and all of the decay.
    """

    def __init__(self, groups: Sequence[Group], run: RunConfig) -> None:
        self.groups = {group.name: group for group in groups}
        self.base = LearningRateSchedule(run.schedule, run.steps)
        self.config = run.optimizer
        self.peak_of_muon = run.muon.learning_rate or run.optimizer.learning_rate
        self.factors: Mapping[str, float] = {}
        """By matrix, which has its own group, of the present step: what its spectrum gives
        (pretrain/diagnostics/spectral_rates.py); 1 where it is not there."""
        self.rules = {rule.name: RuleSchedule(rule, run.steps) for rule in run.lr_rules}
        for group in groups:
            rule = group.rule
            power = group.depth * math.log(rule.depth_decay) if rule else 0.0
            if rule and power > -math.log(LEAST_SHARE):
                raise UserError(
                    f"lr_rules.{rule.name}.depth_decay: {rule.depth_decay:g} multiplies the rate by "
                    f"more than {1 / LEAST_SHARE:,.0f}, {group.depth} layers above the lowest; give one "
                    "nearer to 1"
                )
            share = math.exp(power) if rule and not rule.decay_with_lr else 1.0
            if rule and share < LEAST_SHARE:
                raise UserError(
                    f"lr_rules.{rule.name}.depth_decay: {rule.depth_decay:g} leaves {share:.1g} of the rate "
                    f"{group.depth} layers above the lowest, and decay_with_lr false divides the decay by "
                    "that; give one nearer to 1, or leave out decay_with_lr"
                )

    def compute(
        self, name: str, step: int, released: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[float, float]:
        """Learning rate and weight decay of the group *name* at the 0-based *step*.

        Args:
            released: rule -> the step at which it was released by maturity, for the rules where that has
                happened.
        """
        group = self.groups[name]
        peak = self.peak_of_muon if group.suffix == "muon" else self.config.learning_rate
        rate = peak * self.base.factor(step) * group.width_factor * self.factors.get(group.parameters[0], 1.0)
        decay = self.config.weight_decay / group.width_factor if group.decays else 0.0
        if group.rule is None:
            return rate, decay
        rule = group.rule
        factor = self.rules[rule.name].factor(step, group.depth, released.get(rule.name))
        return rate * factor, decay if rule.decay_with_lr else decay / factor

    def write(
        self, optimizer: Any, step: int, released: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, float]:
        """Write the values of *step* into the optimizer's groups, which are found by name.

        Returns:
            Group name -> learning rate.
        """
        rates = {}
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.compute(group["name"], step, released)
            rates[group["name"]] = group["lr"]
        return rates
