"""Share of sampled lines that are Python, as far as Python's own tokenizer can tell.

    python benchmarks/sampled_python.py runs/NAME [--samples 10] [--tokens 400]

Samples documents without a prompt (temperature 0.8, top-p 0.95), one for each seed from 1 on, and tokenizes every line
that is not empty by itself, without its indentation. The same lines of the standard library's held-out files give the
share that real Python has: a line of a string that spans several, for one, does not tokenize.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from model.sampling import sample  # noqa: E402
from pretrain.data.corpus import Corpus  # noqa: E402
from pretrain.generate import next_token_function  # noqa: E402
from pretrain.hf.open_model import open_model  # noqa: E402


def tokenizes(line: str) -> bool:
    """Whether Python's tokenizer takes the line, and finds no character that it does not know."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def share(text: str) -> float:
    """Share of the lines of *text* that tokenize, empty ones left out; nan without lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    return statistics.mean(map(tokenizes, lines)) if lines else float("nan")


def main() -> None:
    """Sample, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--corpus", help="a prepared corpus folder, whose held-out text is counted, too")
    options = parser.parse_args()
    model = open_model(options.run)
    shares = []
    for seed in range(1, options.samples + 1):
        prompt = [model.tokenizer.end_of_document]
        ids = [*sample(next_token_function(model), prompt, options.tokens, 0.8, 0.95, seed)]
        lines = model.tokenizer.decode(ids).splitlines()[:-1]  # the last one may be cut off
        shares.append(share("\n".join(lines)))
    found = [value for value in shares if value == value]
    print(f"sampled lines that tokenize: {statistics.mean(found):.0%} ({min(found):.0%} to {max(found):.0%})")
    if options.corpus:
        corpus = Corpus.open(options.corpus)
        ids = corpus.validation.read(0, min(200_000, corpus.validation.num_tokens)).tolist()
        print(f"held-out lines that tokenize: {share(corpus.tokenizer.decode(ids)):.0%}")


if __name__ == "__main__":
    main()
