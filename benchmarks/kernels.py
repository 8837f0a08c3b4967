"""Kernels of a step: loss and fused LM head by the size of their chunks, attention by torch's kernel and in
blocks.

    OMP_WAIT_POLICY=passive python benchmarks/kernels.py loss       # asleep; without the variable: spinning
    python benchmarks/kernels.py lm_head                               # the LM head and the loss
    python benchmarks/kernels.py attention --dtype bf16             # by context and head dim
    python benchmarks/kernels.py lm_head --device cuda --dtype bf16 --tokens 16384 \\
        --vocabulary 50304 --width 768

Milliseconds of forward and backward, the fastest of the rounds; the variants take turns. On a GPU also the
memory that one takes at most. A variant that fails is named with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.helpers import parser_of, run_main, say, seconds_of, wait, write  # noqa: E402
from model import lm_head_loss, loss  # noqa: E402
from model.block_attention import block_attention  # noqa: E402
from pretrain.engine.compiling import find_missing_compiler  # noqa: E402
from pretrain.utils.malloc import keep_freed_memory  # noqa: E402

ROUNDS = {"cpu": 7, "cuda": 20}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS_POWERS = {"cpu": (16, 17, 18, 19, 20, 21, 22, 24), "cuda": (20, 22, 24, 26, 28)}
HEAD_POWERS = {"cpu": (20, 21, 22, 23, 24), "cuda": (25, 26, 27, 28)}
PRODUCT_TOKENS = {"cpu": (0, 1024, 2048), "cuda": (0, 4096, 6144, 8192)}

Run = Callable[[], Tensor]


def fastest(variants: dict[str, Run], inputs: tuple[Tensor, ...], gradient: Tensor) -> list[dict[str, Any]]:
    """Time the variants in turn; a row of each, which is printed, with its distance from the first's
    results."""
    rows: dict[str, dict[str, Any]] = {name: {"variant": name} for name in variants}
    first: list[Tensor] = []

    def once(run: Run) -> list[Tensor]:
        for tensor in inputs:
            tensor.grad = None
        output = run()
        output.backward(gradient)
        return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    for name, run in variants.items():
        try:
            once(run)  # it may compile, and picks kernels
            wait()
            if gradient.is_cuda:
                for tensor in inputs:  # freed by the next call, which would count as if it had less
                    tensor.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            found: list[Tensor] = []
            seconds = seconds_of(lambda found=found, run=run: found.extend(once(run)))  # type: ignore[misc]
            say(f"{name:<24}{1e3 * seconds:8.1f} ms, once")
        except Exception as error:  # whatever a kernel says
            rows[name]["reason"] = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            continue
        if gradient.is_cuda:
            rows[name]["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        first = first or found
        rows[name]["distance"] = max(
            float((one - other).abs().max()) for one, other in zip(first, found, strict=True)
        )
    measured: dict[str, list[float]] = {name: [] for name, row in rows.items() if "reason" not in row}
    for _ in range(ROUNDS[gradient.device.type]):
        for name, times in measured.items():
            times.append(seconds_of(partial(once, variants[name])))
    for name, row in rows.items():
        if name not in measured:
            print(f"{name:<24} not here: {row['reason']}")
            continue
        row["ms"] = 1e3 * min(measured[name])
        memory = f"{row['peak_mb']:8.0f} MB" if "peak_mb" in row else ""
        print(f"{name:<24}{row['ms']:8.1f} ms{memory}   differs by at most {row['distance']:.1e}")
    return list(rows.values())


def time_loss(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The chunked loss, by the elements of a chunk."""
    logits = torch.randn(options.tokens, options.vocabulary, device=options.device, requires_grad=True)
    labels = torch.randint(0, options.vocabulary, (options.tokens,), device=options.device)

    def chunks_of(power: int) -> Tensor:
        with mock.patch.dict(loss.CHUNK_ELEMENTS, {options.device: 2**power}):
            return loss.cross_entropy(logits, labels, options.vocabulary)

    variants: dict[str, Run] = {
        f"2^{power}": partial(chunks_of, power) for power in LOSS_POWERS[options.device]
    }
    return fastest(variants, (logits,), torch.ones((), device=options.device))


def add_in_wide_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """As lm_head_loss.add_product, by a product that sums into fp32 itself: torch has one on GPUs."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def time_lm_head(options: argparse.Namespace) -> list[dict[str, Any]]:
    """LM head and loss: apart, then fused, by the elements of a chunk and the tokens of a product (0: a
    chunk)."""
    dtype, device = DTYPES[options.dtype], options.device
    hidden = torch.randn(options.tokens, options.width, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(options.vocabulary, options.width, device=device)).to(dtype)
    weight.requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.tokens,), device=device)
    steps: dict[str, lm_head_loss.Step | None] = {"": None}
    if find_missing_compiler(torch.device(device)) is None:
        torch._dynamo.config.recompile_limit = 64  # two graphs for each size of chunks
        steps["compiled "] = torch.compile(lm_head_loss.loss_and_residual, dynamic=False)

    @contextmanager
    def cut(power: int, tokens: int) -> Iterator[None]:
        with (
            mock.patch.dict(lm_head_loss.CHUNK_ELEMENTS, {device: 2**power}),
            mock.patch.dict(lm_head_loss.PRODUCT_TOKENS, {device: tokens}),
        ):
            yield

    def fused(
        power: int, tokens: int, step: lm_head_loss.Step | None, add: Any = lm_head_loss.add_product
    ) -> Tensor:
        with cut(power, tokens), mock.patch.object(lm_head_loss, "add_product", add):
            return lm_head_loss.lm_head_cross_entropy(hidden, weight, labels, options.vocabulary, step)

    def group_chunks(power: int, tokens: int) -> list[list[slice]]:
        with cut(power, tokens):
            return lm_head_loss.token_products(len(hidden), len(weight), device)

    variants: dict[str, Run] = {
        "apart": lambda: loss.cross_entropy(F.linear(hidden, weight), labels, options.vocabulary)
    }
    for name, step in steps.items():
        for power in HEAD_POWERS[device]:
            seen = []
            for tokens in PRODUCT_TOKENS[device]:
                if (products := group_chunks(power, tokens)) not in seen:  # else the same products again
                    seen.append(products)
                    variants[f"{name}2^{power}, {tokens or 'a chunk'}"] = partial(fused, power, tokens, step)
        if device == "cuda" and dtype != torch.float32:
            variants[f"{name}2^26, 4096, wide"] = partial(fused, 26, 4096, step, add_in_wide_product)
    return fastest(variants, (hidden, weight), torch.ones((), device=device))


def time_attention(options: argparse.Namespace) -> list[dict[str, Any]]:
    """torch's kernel, and model/block_attention.py, of all heads of --width for --tokens in windows of each
    context."""
    rows = []
    for context in (128, 256, 512, 1024, 2048):
        for head_dim in (16, 64, 192, 384):
            shape = (options.tokens // context, context, options.width // head_dim, head_dim)
            query, key, value, gradient = (
                torch.randn(shape, dtype=DTYPES[options.dtype], device=options.device)
                .transpose(1, 2)
                .requires_grad_()
                for _ in range(4)
            )
            variants: dict[str, Run] = {
                "torch": partial(F.scaled_dot_product_attention, query, key, value, is_causal=True),
                "blocks": partial(block_attention, query, key, value, None, None),
            }
            print(f"context {context}, {shape[2]} heads of {head_dim}")
            found = fastest(variants, (query, key, value), gradient.detach())
            rows += [{"context": context, "head_dim": head_dim, **row} for row in found]
    return rows


KINDS = {"loss": time_loss, "lm_head": time_lm_head, "attention": time_attention}


def main() -> None:
    """Time and print."""
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--device", choices=ROUNDS, default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--width", type=int, default=384, help="of the LM head's input, or all attention heads"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of head and attention")
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()  # as training does
    write(options.out, vars(options) | {"torch": torch.__version__, "rows": KINDS[options.what](options)})


if __name__ == "__main__":
    run_main(main)
