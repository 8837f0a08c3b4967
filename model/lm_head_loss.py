"""LM head and mean cross entropy, fused, a chunk of tokens at a time: all logits never exist at once.

The forward pass makes each chunk's logits, their loss, and in place of them its gradient, and from that at
once both gradients of the LM head's product, as liger-kernel and cut-cross-entropy do on GPUs. So the logits
are read once, and what waits for the backward pass is a gradient as large as the hidden state and one as
large as the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.loss import (
    IGNORED_LABEL,
    Report,
    add_z_loss,
    mean_loss,
    row_chunks,
    softcap_backward,
    softmax_with_z_loss,
    widen,
)

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Logits made at a time, by device type: 8 MiB of bf16 on a CPU, so that they stay in its cache; 256 MiB on a
GPU."""
PRODUCT_TOKENS = {"cpu": 1024, "cuda": 6144}
"""Tokens whose gradients are multiplied together, or those of one chunk, by device type. Every such product
is added to the gradient of the whole weight, so it should not be small; docs/log/speed.md has the times."""

Step = Callable[..., Tensor]


def lm_head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    step: Step | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    report: Report | None = None,
) -> Tensor:
    """The mean of -log softmax(hidden @ weight.T)[label] over the tokens with a label, in nats.

    Args:
        hidden: [..., d], of any float dtype.
        weight: [columns, d]; rows from vocab_size on are padding, and get a gradient of exactly zero.
        labels: [...] int64 below vocab_size, or -100 for tokens that do not count.
        step: loss_and_residual, or what torch.compile made of it.
        softcap, z_loss, report: as in model.loss.cross_entropy.

    Returns:
        A scalar, computed in fp32 (fp64 for fp64); 0 if no token counts. It equals model.loss.cross_entropy
        of the logits up to rounding: gradients are summed chunk by chunk, in fp32.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LMHeadCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        vocab_size,
        wanted,
        step or loss_and_residual,
        (softcap, z_loss) if softcap is not None or z_loss else (),
        report,
    )


class _LMHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        wanted: bool,
        step: Step,
        options: tuple[Any, ...],
        report: Report | None,
    ) -> Tensor:
        counted = labels != IGNORED_LABEL  # [N]
        targets = labels.where(counted, 0)  # any valid column: what it yields is masked out
        count = counted.sum().clamp(min=1)
        hidden_gradient = torch.empty_like(hidden) if wanted else None
        weight_gradient: Tensor | None = None
        terms = []
        products = token_products(len(hidden), len(weight), hidden.device.type)
        buffer = hidden.new_empty(products[0][-1].stop, len(weight))
        for chunks in products:
            rows = slice(chunks[0].start, chunks[-1].stop)
            for chunk in chunks:
                logits = buffer[chunk.start - rows.start : chunk.stop - rows.start]
                torch.mm(hidden[chunk], weight.t(), out=logits)
                terms.append(step(logits, targets[chunk], vocab_size, wanted, *options))
            if hidden_gradient is None:
                continue
            residual = buffer[: rows.stop - rows.start]
            torch.mm(residual, weight, out=hidden_gradient[rows])
            # What is ignored adds nothing to the weight's gradient.
            counted_hidden = hidden[rows] * counted[rows, None]
            weight_gradient = add_product(weight_gradient, residual.t(), counted_hidden)
        if wanted:
            ctx.save_for_backward(hidden_gradient, weight_gradient, counted, count)
            ctx.dtypes = hidden.dtype, weight.dtype
        return mean_loss(torch.cat(terms, dim=-1), counted, count, report)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, counted, count = ctx.saved_tensors
        scale = gradients[0] / count
        scales = scale.where(counted, 0)[:, None]  # [N, 1]
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (hidden_gradient * scales).to(hidden_dtype),
            (weight_gradient * scale).to(weight_dtype),
            *(None,) * 6,
        )


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Total + left @ right in fp32, or wider; the total may be overwritten. None is a total of zero."""
    if total is None:
        return (left @ right).to(torch.promote_types(left.dtype, torch.float32))
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


def loss_and_residual(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    wanted: bool,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """The losses [n] of logits [n, columns], in fp32, or with z_loss both terms [2, n] (add_z_loss).

    If *wanted*, logits become the gradient of their sum: softmax(logits) - onehot(target), where there are
    neither softcap nor z_loss.

    The logits may be overwritten anyhow. torch.compile makes one kernel of it.
    """
    if torch.compiler.is_compiling() or softcap is not None or z_loss:
        return _compute_in_one_kernel(logits, targets, vocab_size, wanted, softcap, z_loss)
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits[:, vocab_size:] = -math.inf
    label_logits = logits.gather(1, targets[:, None]).to(wide)
    if not wanted:
        return logits.to(wide).logsumexp(dim=1) - label_logits.squeeze(1)
    largest, position = logits.max(dim=1, keepdim=True)
    probabilities = torch.softmax(logits, dim=1, dtype=wide)
    # log-sum-exp = largest - log(its probability), which is at least 1 / columns: one pass over the logits
    # less.
    losses = largest.to(wide) - probabilities.gather(1, position).log() - label_logits
    probabilities.scatter_add_(1, targets[:, None], probabilities.new_full((1, 1), -1).expand_as(losses))
    logits.copy_(probabilities)
    return losses.squeeze(1)


def _compute_in_one_kernel(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    wanted: bool,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    capped = widen(logits, softcap)
    wide = capped.masked_fill(columns >= vocab_size, -math.inf)
    normalizers = wide.logsumexp(dim=1)
    losses = normalizers - wide.gather(1, targets[:, None]).squeeze(1)
    if wanted:
        shares = softmax_with_z_loss(wide, normalizers[:, None], z_loss)
        residual = shares - (columns == targets[:, None]).to(wide.dtype)
        logits.copy_(softcap_backward(residual, capped, softcap))
    return add_z_loss(losses, normalizers, z_loss)


def token_chunks(tokens: int, columns: int, device_type: str) -> list[slice]:
    """The chunks that the loss of *tokens* is made in, each with at most CHUNK_ELEMENTS logits, or one
    token."""
    return row_chunks(tokens, columns, CHUNK_ELEMENTS, device_type)


def token_products(tokens: int, columns: int, device_type: str) -> list[list[slice]]:
    """The token_chunks, grouped as far as PRODUCT_TOKENS allow; no group has more tokens than the first."""
    chunks = token_chunks(tokens, columns, device_type)
    most = PRODUCT_TOKENS.get(device_type, PRODUCT_TOKENS["cuda"])
    together = max(1, most // chunks[0].stop)
    return [chunks[first : first + together] for first in range(0, len(chunks), together)]
