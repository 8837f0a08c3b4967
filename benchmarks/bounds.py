"""Time of one training step by group of operators, compared with the least time that this machine allows for
it.

    python benchmarks/bounds.py [--shape small] [--kind llama] [--out FILE.json] [FLAGS of pretrain/main.py]

The bounds: products and attention at the fastest rate of bare matrix products; every other operator by the
bytes that it reads and writes once (benchmarks/traffic.py), at the rate of a large copy. Both rates are
measured now. Uncompiled.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import MAIN_FLAGS, parser_of, run_main, write  # noqa: E402
from benchmarks.one_trainer import trainer_of  # noqa: E402 - before torch
from benchmarks.throughput import SHAPES  # noqa: E402

import torch  # noqa: E402 # isort: skip
from torch.profiler import ProfilerActivity, profile  # noqa: E402 # isort: skip

from benchmarks.traffic import Traffic  # noqa: E402
from model.config import ModelConfig  # noqa: E402
from model.errors import UserError  # noqa: E402
from pretrain.runtime.hardware import peak_flops  # noqa: E402

IN_BLOCKS = ("head_schedules::block_attention",)
"""Operators that call others, whose time is theirs."""
GROUPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": (
        "aten::_scaled_dot_product",
        "aten::_flash",
        "aten::_efficient",
        "aten::block_attention",
        *IN_BLOCKS,
    ),
}
COPIED = 2**26  # elements, far more than a cache holds
STEPS = 3


def group_of(operator: str) -> str:
    """The group that an operator's own time belongs to."""
    return next((name for name, starts in GROUPS.items() if operator.startswith(starts)), "everything else")


def group_of_event(event: Any) -> str:
    """The group of an operator's own time: that of the attention which called it, if one did."""
    caller = event
    while caller is not None:
        if caller.name.startswith(IN_BLOCKS):
            return "attention"
        caller = caller.cpu_parent
    return group_of(event.name)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of the best of several large copies."""
    source = torch.ones(COPIED, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def attention_flops(model: ModelConfig, tokens: int) -> int:
    """Two products forward and five backward, over the half of the positions that the causal mask leaves."""
    widths = sum(map(model.attention_width, range(model.num_layers)))
    return 7 * 2 * model.context_length * widths * tokens // 2


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--kind", choices=("llama", "gpt2"), default="llama")
    options, flags = parser.parse_known_args()
    shape = SHAPES[options.shape]
    model = shape.model(options.kind)
    tokens = shape.micro_batch * shape.context
    with trainer_of(model, shape.micro_batch, *flags) as one:
        if one.session.world.device.type != "cpu":
            raise UserError("it measures CPUs: of a GPU, the profiler's times are those of the launches")
        one.step()
        one.step()
        seconds = min(one.seconds(one.step) for _ in range(STEPS))
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
            for _ in range(STEPS):
                one.step()
        with Traffic(compiled=False) as traffic:
            one.step()
        device, bf16 = one.session.world.device, one.session.decisions.bf16
        peak, _ = peak_flops(device, torch.bfloat16 if bf16 else torch.float32)
        rate = copy_rate(device)
    times = dict.fromkeys((*GROUPS, "everything else"), 0.0)
    flops = 0.0
    for event in profiler.events():
        group = group_of_event(event)
        times[group] += event.self_cpu_time_total / 1e6 / STEPS
        flops += (event.flops or 0) / STEPS if group == "products" else 0
    moved = sum(
        count for name, count in traffic.bytes.items() if group_of(f"aten::{name}") == "everything else"
    )
    bounds = {
        "products": flops / peak,
        "attention": attention_flops(model, tokens) / peak,
        "everything else": moved / rate,
    }
    print(f"a step without the profiler: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s")
    print(f"products {peak / 1e9:,.0f} GFLOP/s, copies {rate / 1e9:.1f} GB/s\n")
    print("| operators | seconds | of which at least | ratio |\n|---|---:|---:|---:|")
    for name, bound in bounds.items():
        print(f"| {name} | {times[name]:.3f} | {bound:.3f} | {bound / times[name]:.0%} |")
    print(f"| all | {sum(times.values()):.3f} | {sum(bounds.values()):.3f} | |")
    write(
        options.out,
        vars(options)
        | {
            "flags": flags,
            "seconds": seconds,
            "peak": peak,
            "copies": rate,
            "times": times,
            "bounds": bounds,
        },
    )
    sys.stdout.flush()
    os._exit(0)  # the launcher's threads need not end one by one


if __name__ == "__main__":
    run_main(main)
