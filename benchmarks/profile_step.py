"""Profile of one training step of pretrain/main.py, by operator.

    python benchmarks/profile_step.py [--shape small] [--rows 25] [--out FILE.json] [FLAGS of main.py]

The shapes are those of benchmarks/throughput.py. Two steps come first, so that caches are filled and graphs
compiled. Nothing is compiled unless --compile asks for it. On a GPU the table is sorted by the device's time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from benchmarks.helpers import MAIN_FLAGS, parser_of, run_main, wait, write  # noqa: E402
from benchmarks.one_trainer import trainer_of  # noqa: E402 - before torch
from benchmarks.throughput import SHAPES  # noqa: E402

import torch  # noqa: E402 # isort: skip
from torch.profiler import ProfilerActivity, profile  # noqa: E402 # isort: skip


def operator_row(row: Any) -> dict[str, Any]:
    """An operator's calls, and its own time on the processor and the device in microseconds."""
    return {
        "name": row.key,
        "on": row.device_type.name.lower(),
        "calls": row.count,
        "cpu": row.self_cpu_time_total,
        "device": row.self_device_time_total,
    }


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__, MAIN_FLAGS)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--kind", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--rows", type=int, default=25)
    options, flags = parser.parse_known_args()
    shape = SHAPES[options.shape]
    with trainer_of(shape.model(options.kind), shape.micro_batch, *flags) as one:
        for _ in range(2):
            one.step()
        seconds = one.seconds(one.step)
        print(f"a step without the profiler: {seconds:.3f} s")
        cuda = one.session.world.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiler:
            one.step()
            wait()
        compiled = one.session.decisions.compile.value
    device = "device" if cuda else "cpu"
    averages = profiler.key_averages()
    print(
        averages.table(sort_by=f"self_{device}_time_total", row_limit=options.rows, max_name_column_width=60)
    )
    largest = sorted(averages, key=lambda row: -getattr(row, f"self_{device}_time_total"))
    results = vars(options) | {
        "flags": flags,
        "compiled": compiled,
        "device": device,
        "torch": torch.__version__,
        "seconds": seconds,
        "operators": [operator_row(row) for row in largest],
    }
    write(options.out, results)
    sys.stdout.flush()
    os._exit(0)  # the launcher's threads need not end one by one


if __name__ == "__main__":
    run_main(main)
