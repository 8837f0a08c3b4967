"""Muon for the matrices of the blocks, AdamW for everything else: one optimizer for ZeRO to step.

It is not DeepSpeed's Muon, which writes updates over gradients before they are clipped and makes each
tensor-parallel shard orthogonal separately. This one steps ZeRO's flat fp32 masters as AdamW does, after
clipping.

Matrices are made orthogonal by Newton-Schulz iterations, whole or head by head. Five steps move the singular
values of a matrix that are above 1/600 of its Frobenius norm to between 0.67 and 1.21; smaller ones stay
smaller. The result depends on the matrix's direction, not on its norm.
"""

from __future__ import annotations

import math
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


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon), chosen so that small singular values grow fastest."""
STEPS = 5
SMALLEST_NORM = 1e-30
"""Divides a matrix whose norm is smaller, so that zero stays zero."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Move the singular values of each of *matrices*, [..., rows, cols], towards 1.

    Args:
        dtype: of the iterations; None: bf16 on a GPU, else that of *matrices*.

    Returns:
        Of the given shape and dtype.
    """
    x = matrices.reshape(-1, *matrices.shape[-2:])
    # In fp32 the norm of 768 x 3072 elements is 4e-5 off on a CPU, and so would be the result.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    x = x / norm.clamp_min(SMALLEST_NORM).to(x.dtype)
    x = x.to(dtype or (torch.bfloat16 if x.is_cuda else x.dtype))
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the products below are as wide as there are rows
        x = x.mT
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    if tall:
        x = x.mT
    return x.to(matrices.dtype).reshape(matrices.shape)


def update_size(scale: str, rows: int, cols: int) -> float:
    """The factor of an orthogonal matrix of *rows* (outputs) x *cols* (inputs), by ``muon.scale``.

    rms: entries of root mean square 0.2, about AdamW's (arXiv 2502.16982, section 2.2). spectral: the
    outputs' root mean square changes by about that of the inputs (arXiv 2310.17813).
    """
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols) if scale == "spectral" else 1.0


def matrix_update(matrix: Tensor, settings: MuonConfig, head: tuple[int, int] | None = None) -> Tensor:
    """The update of a whole matrix, [rows, cols], whose momentum (or Nesterov's sum) is *matrix*.

    Args:
        head: the dimension that heads lie along, and the width of one or of a group of them, of q, k, v, o
            and element gates where ``muon.heads`` is not whole. The last group may be smaller; each is scaled
            by its own shape. None for a matrix that is not divided.
    """
    if head is None:
        return orthogonalize(matrix) * update_size(settings.scale, *matrix.shape)
    dimension, width = head
    blocks = matrix.split(width, dimension)
    equal = [block for block in blocks if block.shape[dimension] == width]
    updates = [*(orthogonalize(torch.stack(equal)) * update_size(settings.scale, *equal[0].shape)).unbind()]
    updates += [
        orthogonalize(block) * update_size(settings.scale, *block.shape) for block in blocks[len(equal) :]
    ]
    return torch.cat(updates, dimension)
