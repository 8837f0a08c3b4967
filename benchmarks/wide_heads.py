"""Causal attention of one layer whose heads are wide: which way to compute it is fastest on this device?

    python benchmarks/wide_heads.py [--width 768] [--batch 16] [--length 1024] [--head_dims 64 256 384]

Flash goes up to head dim 256 on a GPU; config-5 and config-7 have heads of 384. A layer of width 768 has two
of those, so that all its logits are few, and plain products may win. Every way takes q, k and v of the same
numbers and goes forward and back:

torch        scaled_dot_product_attention, with the kernel that it chooses
flash, memory-efficient, cuDNN    its other kernels, one by one
products N   batched products and a softmax, compiled, for the queries of N equal parts: each part leaves
             out the keys after its last query. It keeps the softmax for the backward pass.
flex N       FlexAttention, compiled, in blocks of N

Milliseconds are medians of rounds in which the ways take turns. The error is the largest of the output and
the three gradients from fp64, relative to the largest number of each. A way that a device does not have is
named with its reason.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from benchmarks.helpers import parser_of, run_main, say, seconds_of, wait, write  # noqa: E402

ROUNDS = 5
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
PARTS = (1, 2, 4)
BLOCKS = (16, 32, 64)
FLEX_OPTIONS = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
SETTLED_MS = 20.0
"""A round repeats a way for so long, so that a device's clock and launches settle."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, h, T, d_h] -> the same shape."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def by_kernel(kernel: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As by_torch, on this kernel alone."""
    with sdpa_kernel(kernel):
        return by_torch(query, key, value)


def by_products(parts: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As by_torch, the queries in equal *parts* one after the other."""
    length = query.shape[2]
    positions = torch.arange(length, device=query.device)
    outputs = []
    for part in range(parts):
        start, stop = length * part // parts, length * (part + 1) // parts
        logits = query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3)
        hidden = positions[start:stop, None] < positions[:stop]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = (logits * query.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
        outputs.append(scaled.softmax(-1).to(value.dtype) @ value[:, :, :stop])
    return torch.cat(outputs, 2)


def ways(length: int, device: torch.device) -> dict[str, Way]:
    """Every way by its name; what must be compiled is compiled by its first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    found: dict[str, Way] = {"torch": by_torch}
    found |= {name: functools.partial(by_kernel, kernel) for name, kernel in KERNELS.items()}
    for parts in PARTS:
        found[f"products {parts}"] = functools.partial(torch.compile(by_products, dynamic=False), parts)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device=str(device))
    for rows in BLOCKS:
        options = dict.fromkeys(FLEX_OPTIONS, rows)
        flex: Any = torch.compile(flex_attention, dynamic=False)
        found[f"flex {rows}"] = functools.partial(
            flex, block_mask=mask, kernel_options=options | {"num_stages": 1}
        )
    return found


def forward_and_back(way: Way, inputs: Iterable[Tensor], gradient: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = way(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def measured(
    heads: int, head_dim: int, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """A row for every way: milliseconds, peak memory in MB, and the error; or why it cannot be taken."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch._dynamo.reset()  # it gives up after eight graphs of a function
    torch.manual_seed(0)
    shape = (options.batch, heads, options.length, head_dim)
    exact = [torch.randn(shape, dtype=torch.float64, device=device).to(dtype).double() for _ in range(4)]
    expected = forward_and_back(lambda q, k, v: by_products(1, q, k, v), exact[:3], exact[3])
    *inputs, gradient = (tensor.to(dtype) for tensor in exact)
    rows, runs, repeats = [], {}, {}
    for name, way in ways(options.length, device).items():
        row: dict[str, Any] = {"way": name, "heads": heads, "head_dim": head_dim}
        rows.append(row)
        run = functools.partial(forward_and_back, way, inputs, gradient)
        try:
            found = run()
            wait()
            seconds = seconds_of(run, 2)
        except Exception as error:  # whatever a compiler or a kernel says
            row["reason"] = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            continue
        row["error"] = max(
            float((one.double() - other).abs().max() / other.abs().max())
            for one, other in zip(found, expected, strict=True)
        )
        del found
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            row["peak_mb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
        say(f"  {name:<18}{1e3 * seconds:9.2f} ms, twice")
        runs[name], repeats[name] = run, max(1, round(SETTLED_MS / 1e3 / seconds))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds_of(run, repeats[name]))
    for row in rows:
        if row["way"] in times:
            row["ms"] = 1e3 * statistics.median(times[row["way"]])
    return rows


def main() -> None:
    """Measure every head dim, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=768, help="of the layer's attention: heads x head dim")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--head_dims", type=int, nargs="+", default=[64, 256, 384])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as training does; its own row has it
    shape = {name: getattr(options, name) for name in ("width", "batch", "length")}
    rows = []
    for head_dim in options.head_dims:
        if options.width % head_dim:
            parser.error(f"--head_dims: {head_dim} is not valid; give divisors of --width {options.width}")
        heads = options.width // head_dim
        print(f"{heads} heads of {head_dim}, {options.batch} x {options.length} tokens, {device}", flush=True)
        for row in measured(heads, head_dim, options, device):
            rows.append(row)
            if "reason" in row:
                print(f"  {row['way']:<18} not here: {row['reason']}", flush=True)
            else:
                memory = f"{row['peak_mb']:8.0f} MB" if "peak_mb" in row else ""
                print(f"  {row['way']:<18}{row['ms']:9.2f} ms{memory}   error {row['error']:.1e}", flush=True)
        write(options.out, shape | {"device": device.type, "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    run_main(main)
