"""Muon for the matrices of the blocks, AdamW for everything else: one optimizer for ZeRO to step.

It is not DeepSpeed's Muon, which writes updates over gradients before they are clipped and makes each
tensor-parallel shard orthogonal by itself. This one steps ZeRO's flat fp32 masters as AdamW does, after
clipping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pretrain.config.sections import MuonConfig

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, Moment] = ("exp_avg", "exp_avg_sq")


def is_muon(group: dict[str, Any]) -> bool:
    """Whether Muon steps an optimizer group, in this process or in a checkpoint."""
    return group.get("kind") == "muon"


def name_moments(group: dict[str, Any]) -> tuple[Moment, ...]:
    """The moments that the optimizer keeps of a group: AdamW's two, or Muon's momentum under the name of the
    first."""
    return MOMENTS[:1] if is_muon(group) else MOMENTS


class MuonAndAdamW(torch.optim.AdamW):
    """Steps groups of ``kind: muon`` by Muon, those of ``kind: adamw`` by torch's AdamW.

    m ← β m + (1 - β) g; u = orthogonal(β m + (1 - β) g with Nesterov's momentum, else m) x size;
    w ← w - lr (u + weight_decay w). A group's gradient is used up.

    Args:
        groups: with ``kind``, ``lr`` and ``weight_decay``.
        settings: of Muon. They are not stored with the state: a run that continues uses its own.
        adamw: arguments of AdamW.

    Attributes:
        updates: turns what lies in a flat master's place into the updates of the matrices there, in place and
            collectively (pretrain/engine/matrix_exchange.py). Until it is set, Muon changes nothing.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: MuonConfig, **adamw: Any) -> None:
        super().__init__(groups, fused=True, **adamw)
        self.settings = settings
        self.updates: Callable[[Tensor, Tensor], None] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the groups that are in param_groups now: ZeRO puts them there one by one, or all."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not is_muon(group)]
        try:
            if self.param_groups:
                super().step()
        finally:
            self.param_groups = groups
        for group in filter(is_muon, groups):
            for master in group["params"]:
                if master.grad is not None and self.updates is not None:
                    self._step_matrices(master, group)

    def _step_matrices(self, master: Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[master], self.settings.momentum
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
        state["step"] += 1
        momentum, update = state["exp_avg"], master.grad
        assert update is not None and self.updates is not None
        momentum.lerp_(update, 1 - beta)
        if not group["lr"]:  # frozen, on every rank
            update.zero_()
        else:
            if self.settings.nesterov:
                update.lerp_(momentum, beta)
            else:
                update.copy_(momentum)
            self.updates(master, update)
            master.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        state["update_norm"] = torch.linalg.vector_norm(update)  # for diagnostics
