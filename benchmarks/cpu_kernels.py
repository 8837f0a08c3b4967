"""Kernels of a CPU step: loss and fused head by the size of their chunks, attention by torch's kernel and in blocks.

    OMP_WAIT_POLICY=passive python benchmarks/cpu_kernels.py loss       # asleep; without the variable: spinning
    python benchmarks/cpu_kernels.py head                               # the output head and the loss
    python benchmarks/cpu_kernels.py attention --dtype bf16             # by context and head dim

Milliseconds of forward and backward, the fastest of seven; the variants take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from model import head_loss, loss  # noqa: E402
from model.block_attention import block_attention  # noqa: E402

ROUNDS = 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fastest(variants: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
    """Time the variants in turn; print each one's milliseconds and its largest distance from the first's results."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    first: list[Tensor] = []
    distances = {}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            for tensor in inputs:
                tensor.grad = None
            began = time.perf_counter()
            output = run()
            output.backward(gradient)
            seconds[name].append(time.perf_counter() - began)
            found = [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]
            first = first or found
            distances[name] = max(
                float((one - other).abs().max()) for one, other in zip(first, found, strict=True)
            )
    for name, times in seconds.items():
        print(f"{name:<12}{1e3 * min(times):8.0f} ms   differs by at most {distances[name]:.1e}")


def time_loss(options: argparse.Namespace) -> None:
    """The chunked loss, by the elements of a chunk."""
    logits = torch.randn(options.tokens, options.vocabulary, requires_grad=True)
    labels = torch.randint(0, options.vocabulary, (options.tokens,))

    def chunks_of(power: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss.CHUNK_ELEMENTS["cpu"] = 2**power
            return loss.cross_entropy(logits, labels, options.vocabulary)

        return run

    fastest(
        {f"2^{power}": chunks_of(power) for power in (16, 17, 18, 19, 20, 21, 22, 24)},
        (logits,),
        torch.ones(()),
    )


def time_head(options: argparse.Namespace) -> None:
    """Output head and loss: apart, then fused, by the elements of a chunk."""
    hidden = torch.randn(options.tokens, options.width, dtype=DTYPES[options.dtype], requires_grad=True)
    weight = (0.02 * torch.randn(options.vocabulary, options.width)).to(hidden.dtype).requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.tokens,))

    def fused(power: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            head_loss.CHUNK_ELEMENTS["cpu"] = 2**power
            return head_loss.head_cross_entropy(hidden, weight, labels, options.vocabulary)

        return run

    variants: dict[str, Callable[[], Tensor]] = {
        "apart": lambda: loss.cross_entropy(F.linear(hidden, weight), labels, options.vocabulary),
        **{f"2^{power}": fused(power) for power in (18, 19, 20, 21, 22, 23, 25)},
    }
    fastest(variants, (hidden, weight), torch.ones(()))


def time_attention(options: argparse.Namespace) -> None:
    """torch's kernel, and model/block_attention.py, of all heads of --width for --tokens in windows of each context."""
    dtype = DTYPES[options.dtype]
    for context in (128, 256, 512, 1024, 2048):
        for head_dim in (16, 64, 192, 384):
            shape = (options.tokens // context, context, options.width // head_dim, head_dim)
            query, key, value, gradient = (
                torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(4)
            )
            variants: dict[str, Callable[[], Tensor]] = {
                "torch": partial(F.scaled_dot_product_attention, query, key, value, is_causal=True),
                "blocks": partial(block_attention, query, key, value, None, None),
            }
            print(f"context {context}, {shape[2]} heads of {head_dim}")
            fastest(variants, (query, key, value), gradient.detach())


KINDS = {"loss": time_loss, "head": time_head, "attention": time_attention}


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=384, help="of the head's input, or all attention heads")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of head and attention")
    options = parser.parse_args()
    torch.manual_seed(0)
    KINDS[options.what](options)


if __name__ == "__main__":
    main()
