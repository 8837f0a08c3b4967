"""Samples tokens one by one, given a function of all tokens so far for the logits of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from model.decoding import CachedDecoder
from model.errors import UserError
from model.transformer import Transformer

SMALLEST_TEMPERATURE = 1e-4
"""Below it the most likely token is taken: logits divided by less may be infinite in fp32."""
Predict = Callable[[list[int]], Tensor]
"""All token ids so far -> logits [vocabulary] of the next, fp32 on the CPU."""


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

    Every rank that calls this with the same arguments gets the same tokens, and makes the same number of
    forward passes (ZeRO-3 gathers weights in each).

    Args:
        logits_of: token ids [1, T] -> logits [1, T, vocabulary].
        prompt: token ids to continue, at least one.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: sample from the smallest set of tokens whose probability reaches this (nucleus sampling,
            Holtzman et al. 2020).

    Returns:
        The new token ids, without the prompt.

    Raises:
        UserError: as pick.
    """
    predict = make_recomputing_predictor(logits_of, context_length, device)
    return list(sample(predict, prompt, count, temperature, top_p, seed))


@torch.no_grad()
def sample(
    predict: Predict, prompt: Sequence[int], count: int, temperature: float, top_p: float, seed: int
) -> Iterator[int]:
    """Yield *count* token ids after *prompt*, one by one; arguments as in generate."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(pick(predict(tokens), temperature, top_p, generator))
        yield tokens[-1]


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Choose one token id from *logits* [vocabulary] (fp32, CPU).

    Raises:
        UserError: the logits are not finite.
    """
    if not logits.max().isfinite():
        reason = "the model has diverged, or its weights are damaged; give an earlier checkpoint"
        raise UserError(f"model: its logits are not finite (the largest is {logits.max():g}): {reason}")
    scaled = logits / max(temperature, SMALLEST_TEMPERATURE)
    if temperature < SMALLEST_TEMPERATURE or scaled.max().isinf():
        return int(logits.argmax())
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays while the mass before it is short of top_p. The first always does: in fp32 the
        # smallest top_p are zero.
        ordered[1:][(ordered.cumsum(-1) - ordered)[1:] >= top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def make_recomputing_predictor(
    logits_of: Callable[[Tensor], Tensor], context_length: int, device: torch.device | None = None
) -> Predict:
    """Recompute the last context_length tokens each time: works for any model, however it is sharded."""

    def predict(tokens: list[int]) -> Tensor:
        window = torch.tensor([tokens[-context_length:]], dtype=torch.int64, device=device)
        return logits_of(window)[0, -1].float().cpu()

    return predict


def make_incremental_predictor(
    append: Callable[[Tensor], Tensor],
    logits_of: Callable[[Tensor], Tensor],
    context_length: int,
    device: torch.device,
) -> Predict:
    """Compute the new tokens alone, up to context_length; past it every window is recomputed.

    Args:
        append: token ids [1, n] that follow those of all earlier calls -> logits [1, vocabulary].
        logits_of: as in generate.
    """
    beyond = make_recomputing_predictor(logits_of, context_length, device)
    seen = 0

    def predict(tokens: list[int]) -> Tensor:
        nonlocal seen
        if len(tokens) > context_length:
            return beyond(tokens)
        new = torch.tensor([tokens[seen:]], dtype=torch.int64, device=device)
        seen = len(tokens)
        return append(new)[0].float().cpu()

    return predict


def make_cached_predictor(network: Transformer) -> Predict:
    """Run only the new tokens through our own model, with a cache of keys and values."""
    decoder = CachedDecoder(network)
    return make_incremental_predictor(
        decoder.append, network, network.config.context_length, next(network.parameters()).device
    )
