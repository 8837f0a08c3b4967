"""Compares logits of our model with those of the written folder, on real tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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
# Two best tokens nearer than this, relative to the largest logit, are a tie: either may win.
TIES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Comparison:
    """How far two sets of logits are apart."""

    maximum: float
    """Largest absolute difference / largest absolute logit of ours."""
    mean: float
    """Mean absolute difference / largest absolute logit of ours."""
    equal_argmax: float
    """Share of positions with the same most likely token."""
    worst_gap: float
    """Largest gap by our logits, relative to the largest, between our choice and theirs where they differ."""
    positions: int
    dtype: torch.dtype

    @property
    def problem(self) -> str | None:
        """Why the export is wrong; None when it is right."""
        bound, tie = BOUNDS[self.dtype], TIES[self.dtype]
        if not self.maximum <= bound:  # also catches NaN
            return f"logits differ by {self.maximum:.2e} of the largest logit, allowed are {bound:.0e}"
        if self.worst_gap > tie:
            return f"a most likely token differs though it leads by {self.worst_gap:.2e} of the largest logit"
        return None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"max {self.maximum:.2e}, mean {self.mean:.2e} of the largest logit; equal argmax "
            f"{self.equal_argmax:.2%} of {self.positions:,} positions (bound for {name}: "
            f"{BOUNDS[self.dtype]:.0e})"
        )


def kept_positions(length: int) -> Tensor:
    """Evenly spaced positions, the last included: all logits would outweigh the model's weights."""
    return torch.linspace(0, length - 1, min(length, KEPT_POSITIONS)).round().long()


@torch.no_grad()
def our_logits(network: Transformer, tokens: np.ndarray) -> Tensor:
    """Logits [windows, kept positions, vocabulary] of our model for tokens [windows, T], fp32."""
    keep = kept_positions(tokens.shape[1])
    # The output head then sees these positions only.
    hook = network.final_norm.register_forward_hook(lambda module, inputs, output: output[:, keep])
    try:
        return torch.cat([network(torch.from_numpy(row[None])) for row in tokens])
    finally:
        hook.remove()


def folder_logits(folder: Path, tokens: np.ndarray) -> Callable[[int], Tensor]:
    """Load *folder* as a user would, in fp32.

    Returns:
        A function of a window's number that gives its logits [kept positions, vocabulary].
    """
    from transformers import AutoModelForCausalLM

    return model_logits(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval(),
        tokens,
    )


def model_logits(network: Any, tokens: np.ndarray) -> Callable[[int], Tensor]:
    """Like :func:`folder_logits`, for a transformers model in memory."""
    keep = kept_positions(tokens.shape[1])

    def logits(window: int) -> Tensor:
        with torch.no_grad():
            return network(
                torch.from_numpy(tokens[window : window + 1]), logits_to_keep=keep, use_cache=False
            ).logits[0]

    return logits


def compare(ours: Tensor, theirs: Callable[[int], Tensor], dtype: torch.dtype) -> Comparison:
    """Compare logits [windows, positions, vocabulary] with the other model's, window by window.

    Raises:
        UserError: our own logits are not finite, so that nothing can be compared.
    """
    largest = ours.abs().amax().item()
    if not np.isfinite(largest):
        raise UserError("weights: the model's logits are not finite; give an earlier --step")
    maximum = total = worst = 0.0
    equal = 0
    for window, reference in enumerate(ours):
        other_logits = theirs(window)
        difference = (other_logits - reference).abs_()
        window_maximum = difference.amax().item()
        maximum = window_maximum if not window_maximum <= maximum else maximum  # NaN wins
        total += difference.double().sum().item()
        their_choices, our_choices = other_logits.argmax(-1), reference.argmax(-1)
        equal += int((their_choices == our_choices).sum())
        gaps = reference.gather(-1, our_choices[:, None]) - reference.gather(-1, their_choices[:, None])
        worst = max(worst, gaps.amax().item())
        del other_logits, difference
    positions = ours.shape[0] * ours.shape[1]
    return Comparison(
        maximum=maximum / largest,
        mean=total / ours.numel() / largest,
        equal_argmax=equal / positions,
        worst_gap=worst / largest,
        positions=positions,
        dtype=dtype,
    )
