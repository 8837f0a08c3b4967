"""Text from a trained model: ``head-schedules generate DIR|runs/NAME --prompt "Once upon a time"``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from model.declared import NonNegativeFloat, NonNegativeInt, PositiveInt, declared
from pretrain.config.options import parse_options
from pretrain.runtime.command import run_command
from pretrain.utils.format import log_line

if TYPE_CHECKING:
    from torch import Tensor

    from model.sampling import Predict
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.run.session import Session


@declared()
class GenerateOptions:
    """The command line."""

    model: str
    """an exported folder, or a run's folder such as runs/NAME"""
    prompt: str = ""
    """text to continue (default: start a new document)"""
    tokens: PositiveInt = 200
    """at most this many"""
    temperature: NonNegativeFloat = 0.8
    """0 takes the most likely token"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """share of probability to sample from"""
    seed: NonNegativeInt = 0
    """same seed, same text"""
    step: NonNegativeInt | None = None
    """which checkpoint of a run (default: the newest valid one)"""


def run_generate(arguments: Sequence[str]) -> None:
    """Print the prompt and its continuation as it is sampled, up to the end of the document.

    Raises:
        UserError: bad input.
    """
    description = "Continue a text with a trained model."
    options = parse_options(GenerateOptions, arguments, "head-schedules generate", description, ["model"])
    from pretrain.hf.model_folder import check_model

    check_model(options.model, options.step)
    from pretrain.engine.deepspeed_logging import quiet_libraries

    quiet_libraries()
    from model.sampling import make_cached_predictor, sample
    from pretrain.hf.open_model import open_model

    model = open_model(options.model, options.step)
    tokenizer = model.tokenizer
    predict = (
        make_cached_predictor(model.network)
        if model.step is not None
        else make_exported_predictor(model.network, model.tokenizer.vocab_size)
    )
    given = tokenizer.encode(options.prompt)
    prompt = given or [tokenizer.end_of_document]
    if options.prompt.endswith(" ") and tokenizer.decode(prompt[-1:]) == " ":
        print(
            log_line(
                "note", "the prompt ends in a space, which is mostly a part of the next token: leave it out"
            ),
            file=sys.stderr,
        )
    print(options.prompt, end="", flush=True)
    ids = sample(predict, prompt, options.tokens, options.temperature, options.top_p, options.seed)
    for piece in text_pieces(ids, tokenizer, given):
        print(piece, end="", flush=True)
    print()


def make_exported_predictor(network: Any, ids: int | None = None) -> Predict:
    """Like model.sampling.make_cached_predictor, for a transformers model.

    Args:
        ids: number of ids of the tokenizer; an embedding may have more rows.
    """
    from model.sampling import make_incremental_predictor
    from pretrain.hf.modeling_head_schedule import CACHE_NAME

    cache: Any = None

    def append(new: Tensor) -> Tensor:
        nonlocal cache
        output = network(new, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
        cache = output[CACHE_NAME]
        return output.logits[:, -1, :ids]

    def logits_of(window: Tensor) -> Tensor:
        return network(window, use_cache=False).logits[..., :ids]

    return make_incremental_predictor(
        append, logits_of, network.config.max_position_embeddings, network.device
    )


def text_pieces(ids: Iterator[int], tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of the tokens as soon as it is certain: a character may be spelled by several tokens.

    Ends at the end of the document.

    Args:
        prompt: the tokens before them: some tokenizers drop a space from the beginning of what they decode.
    """
    tokens = list(prompt)
    shown = len(tokenizer.decode(tokens))
    for token in ids:
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        certain = text.rstrip("\ufffd") if len(text) - len(text.rstrip("\ufffd")) < 4 else text
        if len(certain) > shown:
            yield certain[shown:]
            shown = len(certain)
    if len(text := tokenizer.decode(tokens)) > shown:
        yield text[shown:]


def sample_text(session: Session, engine: Any, tokens: int) -> str:
    """Sample a document from the trained model without a prompt (temperature 0.8, top-p 0.95). Collective."""
    import torch

    from model.attention import allow_any_length
    from model.sampling import generate

    engine.eval()
    # Every length is another shape; compiling each would take longer than sampling.
    compiled = session.decisions.compile.value
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), allow_any_length():
        ids = generate(
            engine,
            [session.data.tokenizer.end_of_document],
            min(tokens, session.model_config.context_length),
            session.model_config.context_length,
            temperature=0.8,
            top_p=0.95,
            seed=session.run.seed,
            device=session.world.device,
        )
    return session.data.tokenizer.decode(ids)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_generate, arguments)


if __name__ == "__main__":
    sys.exit(main())
