"""Rates of this machine's GPU, from which head-schedules plan predicts the time of a run.

    python benchmarks/rates.py --out rates.json
    head-schedules plan --config 124m --rates rates.json

In bf16: the products of a block forward and backward by its width, causal attention forward and backward by
head dim, with the kernel that torch takes, and the bytes of a sum of two tensors. The fastest of the rounds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.helpers import parser_of, run_main, seconds_of, wait, write  # noqa: E402
from pretrain.plan.speed import Rates  # noqa: E402
from pretrain.runtime.hardware import describe_device  # noqa: E402


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Seconds of a call, after one that may choose kernels."""
    work()
    wait()
    return min(seconds_of(work, repeats=3) for _ in range(rounds))


def products(width: int, tokens: int, device: torch.device, rounds: int) -> float:
    """FLOP/s of q, k and v, o, gate and up, down (of 8/3 of the width) forward and backward."""
    inner = 8 * width // 3 // 64 * 64 or width
    shapes = [(width, 3 * width), (width, width), (width, 2 * inner), (inner, width)]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    pairs = [(tensor(tokens, rows), tensor(columns, rows)) for rows, columns in shapes]
    gradients = [tensor(tokens, columns).detach() for _, columns in shapes]

    def step() -> None:
        for (hidden, weight), gradient in zip(pairs, gradients, strict=True):
            torch.autograd.grad(F.linear(hidden, weight), (hidden, weight), gradient)

    return 6 * tokens * sum(rows * columns for rows, columns in shapes) / fastest(step, rounds)


def attention(dim: int, width: int, batch: int, length: int, device: torch.device, rounds: int) -> float:
    """FLOP/s of two products forward and five backward, of the pairs that are seen."""
    shape = (batch, max(1, width // dim), length, dim)
    query, key, value = heads = [
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, heads, gradient)

    return 7 * batch * shape[1] * length * length * dim / fastest(step, rounds)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 768, 1024, 1536, 2048])
    parser.add_argument("--head_dims", type=int, nargs="+", default=[32, 64, 96, 128, 192, 256, 384, 512])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--megabytes", type=int, default=512, help="of a tensor that is added")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device, tokens = torch.device(options.device), options.batch * options.length
    torch.backends.cuda.enable_cudnn_sdp(False)  # as training does
    by_width = {width: products(width, tokens, device, options.rounds) for width in options.widths}
    sizes = (max(options.widths), options.batch, options.length)
    by_dim = {dim: attention(dim, *sizes, device, options.rounds) for dim in options.head_dims}
    one, other = (torch.zeros(options.megabytes * 500_000, device=device).bfloat16() for _ in range(2))
    moved = 3 * one.nbytes / fastest(lambda: torch.add(one, other, out=one), options.rounds)
    source = f"rates measured on {describe_device(device)}, torch {torch.__version__}"
    rates = Rates(source=source, products=by_width, attention=by_dim, bytes=moved)
    for width, rate in by_width.items():
        print(f"products, width {width:<12}{rate / 1e12:10.3g} TFLOP/s")
    for dim, rate in by_dim.items():
        print(f"attention, head dim {dim:<8}{rate / 1e12:10.3g} TFLOP/s")
    print(f"{'bytes':<28}{moved / 1e12:10.3g} TB/s")
    write(options.out, dataclasses.asdict(rates))


if __name__ == "__main__":
    run_main(main)
