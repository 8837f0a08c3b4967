"""Mean cross entropy in nats per token, in chunks: the logits are never in fp32 all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.process_grid import ProcessGrid

IGNORED_LABEL = -100

Report = Callable[[Tensor], object]
"""Receives the terms of a loss with a z loss: [2], without gradients, the mean cross entropy and what z_loss
adds to it, in nats."""

# Logits are converted to fp32 this many elements at a time, by device type. On a GPU (64 MiB) that saves 1.6
# GB of fp32 logits in the forward pass, and as much for their gradient, at a vocabulary of 50,304 and 8
# sequences of 1,024 bf16 tokens. On a CPU it also keeps a chunk in the cache, but every chunk waits for all
# threads ten times: docs/log/speed.md has the times from 2^16 to 2^24. The bits do not depend on it.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}


def apply_softcap(logits: Tensor, softcap: float) -> Tensor:
    """softcap · tanh(logits / softcap) (Gemma 2, arXiv 2408.00118)."""
    return softcap * torch.tanh(logits / softcap)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
    report: Report | None = None,
) -> Tensor:
    """Mean over the tokens with a label of -log softmax(logits[:vocab_size])[label], in nats.

    softcap: applied to the logits before (see apply_softcap). z_loss: what the mean of their squared
    log-sum-exp is weighted with and added (PaLM, arXiv 2204.02311, section 5). report: called with both parts
    of the loss where there is a z_loss.

    logits: [..., columns] of any float dtype, columns >= vocab_size; the padded columns beyond vocab_size
    take no part in the softmax and get a gradient of exactly zero. labels: [...] int64 below vocab_size, or
    -100 for tokens that do not count. Returns a scalar, computed in fp32 (fp64 for fp64 logits); 0 if no
    token counts. The gradient has the dtype of the logits.
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_size, softcap, z_loss, report)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and one log-sum-exp per token; backward makes the softmax again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        softcap: float | None,
        z_loss: float,
        report: Report | None,
    ) -> Tensor:
        counted = labels != IGNORED_LABEL  # [N]
        targets = labels.where(counted, 0)  # any valid column: what it yields is masked out
        normalizers, losses = [], []
        for rows in _chunks(logits):
            chunk = widen(logits[rows, :vocab_size], softcap)
            normalizer = chunk.logsumexp(dim=-1)  # [n]
            losses.append(normalizer - chunk.gather(1, targets[rows, None]).squeeze(1))
            normalizers.append(normalizer)
        # clamp: a batch without any counted token has loss 0, not 0/0 (and no host sync to find out)
        count = counted.sum().clamp(min=1)
        ctx.save_for_backward(logits, targets, counted, torch.cat(normalizers), count)
        ctx.vocab_size, ctx.softcap, ctx.z_loss = vocab_size, softcap, z_loss
        terms = add_z_loss(torch.cat(losses), torch.cat(normalizers), z_loss)
        return mean_loss(terms, counted, count, report)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, counted, normalizers, count = ctx.saved_tensors
        weights = (gradients[0] / count).where(counted, 0)  # [N]
        result = torch.empty_like(logits)
        result[:, ctx.vocab_size :] = 0
        for rows in _chunks(logits):
            # d loss / d logits = (softmax - one hot) * weight
            wide = widen(logits[rows, : ctx.vocab_size], ctx.softcap)
            chunk = softmax_with_z_loss(wide, normalizers[rows, None], ctx.z_loss)
            index = targets[rows, None]
            chunk.scatter_(1, index, chunk.gather(1, index) - 1)
            result[rows, : ctx.vocab_size] = softcap_backward(
                chunk.mul_(weights[rows, None]), wide, ctx.softcap
            )
        return result, *(None,) * 5


def parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    grid: ProcessGrid,
    softcap: float | None = None,
    z_loss: float = 0.0,
    report: Report | None = None,
) -> Tensor:
    """cross_entropy of logits whose columns are spread over the tensor group, t > 1; the same on all its
    ranks.

    logits: [..., columns / t], this rank's contiguous part; labels and vocab_size are those of the whole
    vocabulary. The logits are not written to and never leave their rank: what is all-reduced per token is the
    largest of the ranks' log-sum-exps, and the sum of their exponentials together with the label's logit, in
    fp32 (fp64 for fp64 logits).
    """
    return _ParallelCrossEntropy.apply(
        logits.flatten(0, -2), labels.flatten(), vocab_size, grid, softcap, z_loss, report
    )


class _ParallelCrossEntropy(torch.autograd.Function):
    """As _CrossEntropy. A rank may hold padded columns only: its part of the sums is zero, its gradient
    too."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        grid: ProcessGrid,
        softcap: float | None,
        z_loss: float,
        report: Report | None,
    ) -> Tensor:
        columns = logits.shape[1]
        first = grid.tensor_rank * columns
        real = min(columns, max(0, vocab_size - first))  # columns of this rank that are not padding
        counted = labels != IGNORED_LABEL  # [N]
        targets = labels - first
        owned = counted & (targets >= 0) & (targets < columns)
        targets = targets.where(owned, 0)  # any valid column: what it yields is masked out
        precision = torch.float64 if logits.dtype == torch.float64 else torch.float32
        local_normalizers = torch.full(labels.shape, -math.inf, dtype=precision, device=logits.device)
        local_target = torch.zeros_like(local_normalizers)
        if real:
            for rows in _chunks(logits):
                chunk = widen(logits[rows, :real], softcap)
                local_normalizers[rows] = chunk.logsumexp(dim=-1)
                local_target[rows] = chunk.gather(1, targets[rows, None]).squeeze(1).where(owned[rows], 0)
        largest = local_normalizers.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=grid.tensor_group)
        sums = torch.stack(((local_normalizers - largest).exp(), local_target))  # [2, N]
        dist.all_reduce(sums, group=grid.tensor_group)
        normalizers = largest + sums[0].log()
        count = counted.sum().clamp(min=1)
        ctx.save_for_backward(logits, targets, owned, counted, normalizers, count)
        ctx.real, ctx.softcap, ctx.z_loss = real, softcap, z_loss
        return mean_loss(add_z_loss(normalizers - sums[1], normalizers, z_loss), counted, count, report)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, owned, counted, normalizers, count = ctx.saved_tensors
        weights = (gradients[0] / count).where(counted, 0)  # [N]
        result = torch.empty_like(logits)
        result[:, ctx.real :] = 0
        if ctx.real:
            for rows in _chunks(logits):
                wide = widen(logits[rows, : ctx.real], ctx.softcap)
                chunk = softmax_with_z_loss(wide, normalizers[rows, None], ctx.z_loss)
                chunk.scatter_add_(1, targets[rows, None], -owned[rows, None].to(chunk.dtype))
                result[rows, : ctx.real] = softcap_backward(
                    chunk.mul_(weights[rows, None]), wide, ctx.softcap
                )
        return result, *(None,) * 6


def add_z_loss(losses: Tensor, normalizers: Tensor, z_loss: float) -> Tensor:
    """Losses [n], or with z_loss [2, n]: the losses, and what z_loss adds to each by its log-sum-exp [n]."""
    return torch.stack((losses, z_loss * normalizers.square())) if z_loss else losses


def mean_loss(terms: Tensor, counted: Tensor, count: Tensor, report: Report | None) -> Tensor:
    """The mean over the *count* tokens that are *counted*, bool [n], of terms [n] or [2, n] (add_z_loss);
    a scalar. Two terms are added, and reported."""
    means = terms.where(counted, 0).sum(-1) / count
    if means.ndim == 0:
        return means
    if report is not None:
        report(means)
    return means.sum()


def softmax_with_z_loss(logits: Tensor, normalizers: Tensor, z_loss: float) -> Tensor:
    """The gradient of the log-sum-exp of logits [n, columns], and of z_loss times its square."""
    softmax = (logits - normalizers).exp_()
    return softmax.mul_(1 + 2 * z_loss * normalizers) if z_loss else softmax


def softcap_backward(gradient: Tensor, capped: Tensor, softcap: float | None) -> Tensor:
    """The gradient of the logits that apply_softcap got, from that of those it gave; overwrites
    *gradient*."""
    return gradient if softcap is None else gradient.mul_(1 - (capped / softcap).square())


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of the rows of logits [N, columns], at most CHUNK_ELEMENTS elements (or one row) each."""
    rows, columns = logits.shape
    return row_chunks(rows, columns, CHUNK_ELEMENTS, logits.device.type)


def row_chunks(rows: int, columns: int, limits: Mapping[str, int], device_type: str) -> list[slice]:
    """Slices of the *rows* of a matrix, as equal as they can be, of at most so many elements, or one row,
    each.

    limits: that number by device type; other devices than those have a GPU's.
    """
    most = max(1, limits.get(device_type, limits["cuda"]) // columns)
    each = max(1, -(-rows // max(1, -(-rows // most))))  # 1 where there are no rows
    return [slice(start, min(start + each, rows)) for start in range(0, rows, each)]


def widen(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits in fp32 (fp64 stays), soft-capped where there is a cap."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if softcap is None else apply_softcap(wide, softcap)
