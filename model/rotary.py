"""Rotary position embedding (RoFormer, arXiv 2104.09864), one table per distinct head dim.

Pairs are (i, i + d_h/2), the "rotate half" convention of Hugging Face's Llama, so its weights fit unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.schedules import LinearScaling, RopeScaling, YarnScaling

# Cosines and sines, each [length, 1, d_h / 2], or [B, length, 1, d_h / 2] where positions differ by sequence.
Table = tuple[Tensor, Tensor]


class RotaryTables:
    """Cosine and sine tables, made on first use for a number of rotated dims and a base, and shared by all
    layers that have both.

    Not a module and no buffers, on purpose: casting the model to bf16 must not round the tables (at position
    1000 a bf16 angle is wrong by several radians), and they are not part of a checkpoint.
    """

    def __init__(self, context_length: int, scaling: RopeScaling | None = None) -> None:
        self.context_length = context_length
        self.scaling = scaling
        self._tables: dict[tuple[int, float, torch.device, torch.dtype], Table] = {}

    def get(self, head_dim: int, base: float, length: int, device: torch.device, dtype: torch.dtype) -> Table:
        """Cosines and sines [length, 1, head_dim / 2] for positions 0 … length-1.

        Args:
            head_dim: of a head, the dims that are rotated.
            base: of the wavelengths.

        They are fp32 (fp64 if *dtype*, the model's, is): the angle of position p and pair i is
        p * base^(-2i / head_dim), or of the scaled frequency, computed on the CPU so that every device has
        the same table.
        """
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        key = (head_dim, base, device, precision)
        if key not in self._tables:
            # Not an inference tensor, even if an evaluation in inference mode comes first: training saves it.
            with torch.inference_mode(False), torch.no_grad():
                cosines, sines = _table(self.context_length, head_dim, base, precision, self.scaling)
                self._tables[key] = (cosines.to(device), sines.to(device))
        cosines, sines = self._tables[key]
        return cosines[:length], sines[:length]


def _table(
    length: int, head_dim: int, base: float, precision: torch.dtype, scaling: RopeScaling | None
) -> Table:
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=precision) / head_dim
    positions = torch.arange(length, device="cpu", dtype=precision)
    frequencies = 1.0 / base**exponents
    if scaling is not None:
        frequencies = _scale_frequencies(frequencies, scaling, base)
    angles = torch.outer(positions, frequencies).unsqueeze(1)  # [length, 1, d_h / 2]
    if isinstance(scaling, YarnScaling):
        return angles.cos() * scaling.magnitude, angles.sin() * scaling.magnitude
    return angles.cos(), angles.sin()


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Frequencies [d_h / 2] in radians a position, lowered as RopeScaling says."""
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        pairs = len(frequencies)

        def pair_of(turns: float) -> float:
            """The pair, as a fraction, that turns so often in the original context."""
            longest = scaling.original_context_length / (turns * 2 * math.pi)
            return pairs * math.log(longest) / math.log(base)

        first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        # Clamped to the dims of a head, as transformers does, not to its pairs.
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = (torch.arange(pairs, device="cpu", dtype=frequencies.dtype) - first) / (
            (last - first) or 0.001
        )
        kept = 1 - ramp.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    waves = scaling.original_context_length * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def table_rows(table: Table, start: int, stop: int) -> Table:
    """Views of a table's positions ``start … stop - 1``."""
    cosines, sines = table
    return cosines[..., start:stop, :, :], sines[..., start:stop, :, :]


def rotate(heads: Tensor, table: Table) -> Tensor:
    """Rotate the pairs of q or k [B, T, h, d_h] that the table has angles for, the first dims of a head, by
    their position's angle, in the table's precision; the others stay."""
    dims = 2 * table[0].shape[-1]
    if dims < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :dims], table), heads[..., dims:]), dim=-1)
    if torch.compiler.is_compiling():  # the compiler makes one pass of it, forward and backward
        return rotate_by_swapping(heads, table) if heads.is_cuda else rotate_plainly(heads, table)
    return _Rotation.apply(heads, *table)


def rotate_plainly(heads: Tensor, table: Table) -> Tensor:
    """The formula of rotate, written out."""
    cosines, sines = table
    first, second = heads.chunk(2, dim=-1)  # each [B, T, h, d_h / 2]
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.to(heads.dtype)


def rotate_by_swapping(heads: Tensor, table: Table) -> Tensor:
    """Bit-identical to rotate_plainly, without concatenating halves: x·cos + swapped(x)·(∓sin).

    For GPUs: triton can then write the gradients of q and k to where those of a fused product are expected;
    else they would be copied. Compiled for a CPU it is up to five times as slow where half a head is less
    than a vector register.
    """
    cosines, sines = table
    halves = heads.unflatten(-1, (2, -1))  # [B, T, h, 2, d_h / 2]
    # -1 for the first half, 1 for the second.
    signs = torch.arange(-1, 2, 2, device=heads.device).unsqueeze(-1)
    rotated = halves * cosines.unsqueeze(-2) + halves.flip(-2) * (sines.unsqueeze(-2) * signs)
    return rotated.flatten(-2).to(heads.dtype)


class _Rotation(torch.autograd.Function):
    """rotate_plainly in six kernels, none of which joins halves; its gradient is the rotation by the opposite
    angle."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotate_pairs(heads, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotate_pairs(gradients[0], cosines, sines, -1), None, None


def _rotate_pairs(heads: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> Tensor:
    """Every pair of heads [B, T, h, d_h] rotated by sign * angle."""
    # bf16 heads are widened inside the products, which saves a pass.
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.empty(heads.shape, dtype=cosines.dtype, device=heads.device)
    left, right = rotated.chunk(2, dim=-1)
    # Not addcmul_: it rounds once where the formula rounds twice, and the bits would differ from
    # rotate_plainly's.
    torch.mul(first, cosines, out=left).sub_(second * sines, alpha=sign)
    torch.mul(second, cosines, out=right).add_(first * sines, alpha=sign)
    return rotated.to(heads.dtype)


def rotate_spans(heads: Tensor, table: Table, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Rotate rows that stand for the positions of *spans*, chunk after chunk.

    Each chunk uses its rows of the table, which are views: autograd keeps no copy of them.
    """
    chunks = heads.split([stop - start for start, stop in spans], dim=1)
    return torch.cat(
        [
            rotate(chunk, table_rows(table, start, stop))
            for chunk, (start, stop) in zip(chunks, spans, strict=True)
        ],
        dim=1,
    )
