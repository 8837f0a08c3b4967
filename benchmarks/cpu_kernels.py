"""Kernels of a CPU step: loss and fused head by the size of their chunks, attention by torch's kernel or in blocks.

    OMP_WAIT_POLICY=passive python benchmarks/cpu_kernels.py loss       # asleep; without the variable: spinning
    python benchmarks/cpu_kernels.py head                               # the output head and the loss
    python benchmarks/cpu_kernels.py attention --length 512 --head_dim 64

Milliseconds of forward and backward, the fastest of seven; the variants take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from model import head_loss, loss  # noqa: E402

ROUNDS = 7


class BlockAttention(torch.autograd.Function):
    """Causal attention by batched products over blocks of queries; the backward pass makes the softmax again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
        """Query, key, value [heads, T, d_h] -> [heads, T, d_h]."""
        scale, length = query.shape[-1] ** -0.5, query.shape[1]
        output, normalizers = torch.empty_like(query), query.new_empty(query.shape[:2])
        hidden = torch.full((rows, rows), float("-inf")).triu(1)
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            logits = torch.bmm(query[:, start:stop] * scale, key[:, :stop].transpose(1, 2))
            logits[:, :, start:] += hidden[: stop - start, : stop - start]
            shares = torch.softmax(logits, -1)
            # Every query sees the first key, so its share is never zero.
            normalizers[:, start:stop] = logits[:, :, 0] - shares[:, :, 0].log()
            output[:, start:stop] = torch.bmm(shares, value[:, :stop])
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.rows = rows
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, normalizers = ctx.saved_tensors
        [gradient], rows = gradients, ctx.rows
        scale, length = query.shape[-1] ** -0.5, query.shape[1]
        inner = (gradient * output).sum(-1)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        hidden = torch.full((rows, rows), float("-inf")).triu(1)
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            part, parts = slice(start, stop), slice(0, stop)
            logits = torch.baddbmm(
                normalizers[:, part, None],
                query[:, part],
                key[:, parts].transpose(1, 2),
                beta=-1,
                alpha=scale,
            )
            logits[:, :, start:] += hidden[: stop - start, : stop - start]
            shares = logits.exp_()
            d_value[:, parts].baddbmm_(shares.transpose(1, 2), gradient[:, part])
            d_logits = torch.baddbmm(
                inner[:, part, None], gradient[:, part], value[:, parts].transpose(1, 2), beta=-1
            ).mul_(shares)
            d_query[:, part] = torch.bmm(d_logits, key[:, parts]) * scale
            d_key[:, parts].baddbmm_(d_logits.transpose(1, 2), query[:, part], alpha=scale)
        return d_query, d_key, d_value, None


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
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    weight = (0.02 * torch.randn(options.vocabulary, options.width)).requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.tokens,))

    def fused(power: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            head_loss.CHUNK_ELEMENTS["cpu"] = 2**power
            return head_loss.head_cross_entropy(hidden, weight, labels, options.vocabulary)

        return run

    variants: dict[str, Callable[[], Tensor]] = {
        "apart": lambda: loss.cross_entropy(F.linear(hidden, weight), labels, options.vocabulary),
        **{f"2^{power}": fused(power) for power in (19, 20, 21, 22, 23, 25)},
    }
    fastest(variants, (hidden, weight), torch.ones(()))


def time_attention(options: argparse.Namespace) -> None:
    """torch's kernel, and blocks of 64, 128, 256 queries."""
    shape = (options.heads, options.length, options.head_dim)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def in_blocks(rows: int) -> Callable[[], Tensor]:
        return lambda: BlockAttention.apply(query, key, value, rows)

    variants: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[
            0
        ]
    }
    variants |= {f"blocks {rows}": in_blocks(rows) for rows in (64, 128, 256) if rows <= options.length}
    fastest(variants, (query, key, value), torch.randn(shape))


KINDS = {"loss": time_loss, "head": time_head, "attention": time_attention}


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=384, help="of the head's input")
    parser.add_argument("--heads", type=int, default=48, help="of all sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--head_dim", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    KINDS[options.what](options)


if __name__ == "__main__":
    main()
