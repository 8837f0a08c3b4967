"""Makes matrices orthogonal by Newton-Schulz iterations, whole or head by head: Muon's updates.

Five steps move the singular values of a matrix that are above 1/600 of its Frobenius norm to between 0.67
and 1.21; smaller ones stay smaller. The result depends on the matrix's direction, not on its norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretrain.config.sections import MuonConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon), chosen so that small singular values grow fastest."""
STEPS = 5
SMALLEST_NORM = 1e-30
"""A matrix with a smaller norm counts as zero, and stays so."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Move the singular values of *matrices*, [..., rows, cols], towards 1, each by itself.

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
        head: the dimension that heads lie along and their width, of q, k, v and o with ``muon.heads: each``;
            None for a matrix that is not divided.
    """
    blocks = matrix[None] if head is None else torch.stack(matrix.split(head[1], head[0]))
    blocks = orthogonalize(blocks) * update_size(settings.scale, *blocks.shape[-2:])
    return blocks[0] if head is None else torch.cat(blocks.unbind(), head[0])
