"""The residual directional energy of a layer, its extreme eigenpairs, and the directions already captured.

arXiv 2604.10703. With x the normalized vectors that enter a layer's attention, C = E[x xᵀ] (per token, so
that thresholds depend neither on the batch nor on its length), and M_a the skew part of Σ_h W_Q,h W_K,hᵀ:

    A_res = P sym(C M_a) P,   P = I − Q Qᵀ,   sym(B) = (B + Bᵀ)/2

Q holds the captured directions. C is symmetric and M_a skew, so sym(C M_a) = ½ [C, M_a] has trace zero, is
zero where C is isotropic, and its norm is at most ½ (λ_max − λ_min)(C) · ‖M_a‖.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ATTEMPTS = ((1e-4, 20), (1e-2, 64))
"""Relative accuracy of the eigenvalues, and vectors of the Lanczos basis; the second where the first does not
converge, because many eigenvalues are nearly equal."""


class Extremes(NamedTuple):
    """The largest and the smallest eigenvalue of a symmetric matrix [d, d], with unit eigenvectors [d]."""

    largest: float
    top: Tensor
    smallest: float
    bottom: Tensor


def skew_product(query: Tensor, key: Tensor) -> Tensor:
    """M_a [d, d]: the skew part of W_Q W_Kᵀ summed over heads, of the q and k weights [A, d] of a layer."""
    product = query.T @ key
    return (product - product.T) / 2


def residual(second_moment: Tensor, skew: Tensor, captured: Tensor) -> Tensor:
    """A_res [d, d] of C [d, d], M_a [d, d] and orthonormal captured directions [k, d]."""
    product = second_moment @ skew
    return project_out((product + product.T) / 2, captured)


def project_out(matrix: Tensor, captured: Tensor) -> Tensor:
    """P B P of a symmetric B [d, d], for orthonormal directions [k, d] that P = I − QQᵀ takes away."""
    if not len(captured):
        return matrix
    half = matrix - captured.T @ (captured @ matrix)
    return half - (half @ captured.T) @ captured


def extremes(matrix: Tensor, start: Tensor | None = None) -> Extremes:
    """The extreme eigenpairs of a symmetric matrix [d, d], from products with vectors only (ARPACK's
    Lanczos).

    Args:
        matrix: on any device.
        start: a vector [d] to begin with, such as the eigenvector of the last check; equal starts give equal
            bits.
    """
    from scipy.sparse.linalg import ArpackError, eigsh  # runs that do not grow need none of it

    values = matrix.detach().double().cpu().numpy()
    size = len(values)
    scale = float(np.abs(values).max(initial=0.0))
    if scale == 0 or not math.isfinite(scale):
        zero = torch.zeros(size)
        return Extremes(0.0, zero, 0.0, zero)
    first = np.ones(size) if start is None or not bool(start.any()) else start.double().cpu().numpy()
    # The start must not be an eigenvector itself, or the basis is one vector long.
    first = first / np.linalg.norm(first) + np.cos(np.arange(size)) / math.sqrt(size)
    # What a restart draws must also depend only on the matrix; older versions of scipy fix it themselves.
    seeded: dict[str, Any] = {"rng": 0} if "rng" in inspect.signature(eigsh).parameters else {}
    for tolerance, basis in ATTEMPTS if size >= 8 else ():  # ARPACK needs room for its basis
        with contextlib.suppress(ArpackError):  # among them that it has not converged
            more = {"tol": tolerance, "ncv": min(basis, size), **seeded}
            eigenvalues, vectors = eigsh(values, k=2, which="BE", v0=first, **more)
            break
    else:
        eigenvalues, vectors = np.linalg.eigh(values)
    order = np.argsort(eigenvalues)
    low, high = int(order[0]), int(order[-1])

    def vector(index: int) -> Tensor:
        column = vectors[:, index]
        sign = np.sign(column[np.abs(column).argmax()])  # an eigenvector's sign is arbitrary; ours is not
        return torch.from_numpy(column * sign).float()

    return Extremes(float(eigenvalues[high]), vector(high), float(eigenvalues[low]), vector(low))


def extend_basis(captured: Tensor, direction: Tensor) -> Tensor:
    """Captured directions [k, d] with one more [d]: orthonormal, by Gram-Schmidt done twice, in fp64.

    Raises:
        ValueError: the direction lies in the span of those captured already.
    """
    basis, rest = captured.double(), direction.double()
    rest = rest / torch.linalg.vector_norm(rest)
    for _ in range(2):
        rest = rest - (basis @ rest) @ basis
    length = torch.linalg.vector_norm(rest)
    if not length > 1e-6:
        raise ValueError("the direction is captured already")
    return torch.cat([basis, (rest / length)[None]]).float()


def head_energies(second_moment: Tensor, query: Tensor, key: Tensor, head_dim: int) -> list[float]:
    """‖C M_a,h‖_F of every head, of q and k weights [A, d] in blocks of *head_dim* rows.

    C M_a,h = ½ (C q k − C k q) with q [d, d_h] and k [d_h, d] has rank 2 d_h at most, so that its norm
    follows from matrices of that size.
    """
    energies = []
    for q, k in zip(query.split(head_dim), key.split(head_dim), strict=True):
        left = torch.cat([q, -k]) @ second_moment / 2  # [2 d_h, d]; C is symmetric
        right = torch.cat([k, q])
        square = ((left @ left.T) * (right @ right.T)).sum()
        energies.append(math.sqrt(max(square.item(), 0.0)))  # in this order a NaN stays one
    return energies
