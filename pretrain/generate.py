"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    count: int,
    context_length: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[int]:
    """Sample *count* tokens after *prompt*, recomputing the (at most context_length long) prefix for each.

    Every rank that calls this with the same arguments gets the same tokens, and makes the same number of forward
    passes (ZeRO-3 gathers weights in each).

    Args:
        logits_of: token ids [1, T] -> logits [1, T, vocabulary].
        prompt: token ids to continue, at least one.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: sample from the smallest set of tokens whose probability reaches this (nucleus sampling, Holtzman et
            al. 2020).

    Returns:
        The new token ids, without the prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context_length:]], dtype=torch.int64, device=device)
        logits = logits_of(window)[0, -1].float().cpu()
        tokens.append(pick(logits, temperature, top_p, generator))
    return tokens[len(prompt) :]


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Choose one token id from *logits* [vocabulary] (fp32, CPU)."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays while the mass before it is short of top_p, so the first always does.
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))
