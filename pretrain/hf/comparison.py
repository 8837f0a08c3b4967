"""Compares logits of our model with those of the written folder, on real tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.errors import UserError
from model.transformer import Transformer

WINDOWS = 3
KEPT_POSITIONS = 64
MAX_LENGTH = 2048
# Largest difference allowed, relative to the largest logit. What is written in fp32 is copied, so that only
# the order of sums differs. Rounding every weight to bf16 (8 bits) or fp16 (11 bits) moves logits by about
# 1e-2 and 1e-3.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def kept_positions(length: int) -> Tensor:
    """Evenly spaced positions, the last included: all logits would outweigh the model's weights."""
    return torch.linspace(0, length - 1, min(length, KEPT_POSITIONS)).round().long()


@torch.no_grad()
def our_logits(network: Transformer, tokens: np.ndarray) -> Tensor:
    """Logits [windows, kept positions, vocabulary] of our model for tokens [windows, T], fp32."""
    keep = kept_positions(tokens.shape[1])
    # The LM head then sees these positions only.
    hook = network.final_norm.register_forward_hook(lambda module, inputs, output: output[:, keep])
    try:
        return torch.cat([network(torch.from_numpy(row[None])) for row in tokens])
    finally:
        hook.remove()


@torch.no_grad()
def their_logits(network: Any, tokens: np.ndarray) -> Tensor:
    """Like :func:`our_logits`, for a transformers model."""
    options = {"logits_to_keep": kept_positions(tokens.shape[1]), "use_cache": False}
    return torch.cat([network(torch.from_numpy(row[None]), **options).logits for row in tokens])


def compare(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> str:
    """How far logits [windows, positions, vocabulary] are apart, in words.

    Args:
        dtype: of the weights that were written.

    Raises:
        UserError: farther than rounding explains.
    """
    difference, largest, bound = (theirs - ours).abs(), ours.abs().max(), BOUNDS[dtype]
    maximum = float(difference.max() / largest)
    if not maximum <= bound:  # also catches NaN
        raise UserError(
            f"convert: logits differ by {maximum:.2e} of the largest logit, allowed are {bound:.0e}; "
            "nothing was written"
        )
    mean = float(difference.mean(dtype=torch.float64) / largest)
    equal = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    return (
        f"max {maximum:.2e}, mean {mean:.2e} of the largest logit (bound {bound:.0e}); equal argmax "
        f"{equal:.2%} of {ours[..., 0].numel():,} positions"
    )
