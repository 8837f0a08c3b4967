"""Text from a trained model: ``python -m pretrain.generate DIR|runs/NAME --prompt "Once upon a time"``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.errors import UserError, run_command, shown

if TYPE_CHECKING:
    from model.transformer import Transformer
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.hf.open_model import OpenedModel

SMALLEST_TEMPERATURE = 1e-4
"""Below it logits divided by it may be infinite in fp32, and probabilities NaN."""
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
    predict = recomputed(logits_of, context_length, device)
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


# ---------------------------------------------------------------------- ways to get the next token's logits


def recomputed(
    logits_of: Callable[[Tensor], Tensor], context_length: int, device: torch.device | None = None
) -> Predict:
    """Recompute the last context_length tokens for every token: works for any model, however it is sharded."""

    def predict(tokens: list[int]) -> Tensor:
        window = torch.tensor([tokens[-context_length:]], dtype=torch.int64, device=device)
        return logits_of(window)[0, -1].float().cpu()

    return predict


def cached(network: Transformer) -> Predict:
    """Run only the new tokens through our own model. Past context_length every window is recomputed."""
    from model.decoding import CachedDecoder

    device = next(network.parameters()).device
    context_length = network.config.context_length
    decoder = CachedDecoder(network)
    beyond = recomputed(network, context_length, device)

    def predict(tokens: list[int]) -> Tensor:
        if len(tokens) > context_length:
            return beyond(tokens)
        new = torch.tensor([tokens[decoder.length :]], dtype=torch.int64, device=device)
        return decoder.append(new)[0].float().cpu()

    return predict


def cached_exported(network: Any) -> Predict:
    """Like ``cached``, for a transformers model."""
    context_length = network.config.max_position_embeddings
    state: dict[str, Any] = {"cache": None, "length": 0}
    beyond = recomputed(
        lambda window: network(window, use_cache=False).logits, context_length, network.device
    )

    def predict(tokens: list[int]) -> Tensor:
        if len(tokens) > context_length:
            return beyond(tokens)
        new = torch.tensor([tokens[state["length"] :]], dtype=torch.int64, device=network.device)
        output = network(new, past_key_values=state["cache"], use_cache=True, logits_to_keep=1)
        state["cache"], state["length"] = output.past_key_values, len(tokens)
        return output.logits[0, -1].float().cpu()

    return predict


# ---------------------------------------------------------------------- command


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    from pretrain.config.command_line import CommandParser as Parser

    parser = Parser(
        prog="python -m pretrain.generate",
        description="Continue a text with a trained model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="DIR|RUN", help="an exported folder, or a run's folder such as runs/NAME"
    )
    parser.add_argument("--prompt", default="", help="text to continue; without it, a document from nothing")
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="at most this many (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token (default: %(default)s)"
    )
    parser.add_argument(
        "--top_p", type=float, default=0.95, help="share of probability to sample from (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default: %(default)s)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of a run (default: the newest valid one)"
    )
    parser.add_argument(
        "--no_cache", action="store_true", help="recompute the whole text for every token (to compare)"
    )
    return parser


def run_generate(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation as it is sampled, up to the end of the document.

    Raises:
        UserError: bad input.
    """
    options = build_parser().parse_args(arguments)
    _check(options)
    from pretrain.engine.quiet import quiet_libraries

    quiet_libraries()
    from pretrain.hf.open_model import open_model

    model = open_model(options.model, options.step)
    tokenizer = model.tokenizer
    predict = next_token_function(model, cache=not options.no_cache)
    prompt = tokenizer.encode(options.prompt) or [tokenizer.end_of_document]
    print(options.prompt, end="", flush=True)
    ids = sample(predict, prompt, options.tokens, options.temperature, options.top_p, options.seed)
    for piece in text_pieces(ids, tokenizer):
        print(piece, end="", flush=True)
    print()


def _check(options: argparse.Namespace) -> None:
    checks = {
        "tokens": (options.tokens >= 1, "give a positive number"),
        "temperature": (
            options.temperature == 0 or SMALLEST_TEMPERATURE <= options.temperature < float("inf"),
            f"give zero, which takes the most likely token, or at least {SMALLEST_TEMPERATURE}",
        ),
        "top_p": (0 < options.top_p <= 1, "give a share in (0, 1]"),
        "seed": (0 <= options.seed < 2**63, "give a number from 0 to 2^63 - 1"),
    }
    for name, (valid, advice) in checks.items():
        if not valid:
            raise UserError(f"{name}: {shown(getattr(options, name))} is not valid; {advice}")
    try:
        options.prompt.encode("utf-8")
    except UnicodeEncodeError:  # Python's stand-ins for bytes of the command line that are not text
        raise UserError(
            f"prompt: {shown(options.prompt)} is not UTF-8 text; give it in that encoding"
        ) from None


def next_token_function(model: OpenedModel, cache: bool = True) -> Predict:
    """Choose how the next token's logits are computed: with a cache of keys and values, or from the whole text."""
    if not cache:
        return recomputed(model.logits, model.context_length, model.device)
    return cached(model.network) if model.step is not None else cached_exported(model.network)


def text_pieces(ids: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of the tokens as soon as it is certain: a character may be spelled by several tokens.

    Ends at the end of the document.
    """
    tokens: list[int] = []
    shown = 0
    for token in ids:
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        certain = text.rstrip("\ufffd") if len(text) - len(text.rstrip("\ufffd")) < 4 else text
        if len(certain) > shown:
            yield certain[shown:]
            shown = len(certain)
    if tokens and len(text := tokenizer.decode(tokens)) > shown:
        yield text[shown:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_generate, arguments)


if __name__ == "__main__":
    sys.exit(main())
