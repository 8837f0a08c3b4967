"""Muon's update in fp64, written without the code under test."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X from X / ||X||, fp64."""
    x = matrix.double()
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        product = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * product + 2.0315 * (x @ x.T @ product)
    return x


def muon_updates(
    gradients: list[Tensor], beta: float, nesterov: bool, heads: list[Tensor | None]
) -> list[Tensor]:
    """The updates (to subtract, at rate 1) of a sequence of gradients of one matrix, sized by ``rms``.

    Args:
        heads: index tensors of the rows of each head; or None for the whole matrix.
    """
    momentum, updates = torch.zeros_like(gradients[0], dtype=torch.float64), []
    for gradient in gradients:
        momentum = beta * momentum + (1 - beta) * gradient.double()
        direction = beta * momentum + (1 - beta) * gradient.double() if nesterov else momentum
        update = torch.zeros_like(direction)
        for rows in heads:
            block = direction if rows is None else direction[rows]
            new = newton_schulz(block) * 0.2 * math.sqrt(max(block.shape))
            if rows is None:
                update = new
            else:
                update[rows] = new
        updates.append(update)
    return updates
