"""Predicted against measured memory: short sessions in fresh processes, and what pretrain.plan.memory
says of them.

    python benchmarks/memory.py              # the table of docs/log/memory.md, about ten minutes on two cores
    python benchmarks/memory.py --stages 2 --precisions bf16 --data_parallel 1
    python benchmarks/memory.py --model prism-124m --data_parallel 1 --precisions bf16     # on a GPU
    python benchmarks/memory.py --model prism-nano --data_parallel 1 --stages 2 --precisions fp32 \\
        --checkpointing 0 --micro_batch 1 --context_length 8192 --context_parallel 1 2 4

On a machine with a GPU the ranks train on it (one each), and torch's own peak is what is compared.
``--trace`` compares the most that torch's allocator hands out in place of resident memory, which on a CPU
shows the formulas without what the system's allocator keeps; it is slower.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.blocks import block
from model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.helpers import command_line_of, parser_of, run_main, run_ranks, write  # noqa: E402
from model.presets import preset  # noqa: E402
from pretrain.engine.ds_config import EngineSettings  # noqa: E402
from pretrain.engine.ds_config_check import read_ds_config  # noqa: E402
from pretrain.plan.memory import MemoryPlan, memory_plan  # noqa: E402

MIB = 1 << 20
SHOWN = (
    "stage",
    "precision",
    "data_parallel",
    "tensor_parallel",
    "context_parallel",
    "micro_batch",
    "accumulation",
    "checkpointing",
)
# 8.7 million parameters: states of 122 to 175 MB, and activations of about as much.
SMALL = block("llama", vocab_size=4000, context_length=128, d_model=320, heads="4x2,5x2,10x2", ffn_width=864)
# On a CPU a bucket that is never filled takes no memory, so these are smaller than the model.
BUCKETS = {
    "reduce_bucket_size": 2_000_000,
    "stage3_prefetch_bucket_size": 1_000_000,
    "stage3_param_persistence_threshold": 10_000,
}
# glibc gives memory back when it is freed, so that resident memory is memory in use.
RETURNS_MEMORY = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
STEPS = 3  # the first makes the moments, the second at stage 3 follows the first's trace


@dataclass(frozen=True)
class Case:
    """One session."""

    stage: int
    precision: str = "fp32"
    data_parallel: int = 1
    checkpointing: bool = False
    micro_batch: int = 8
    accumulation: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    model: ModelConfig = SMALL
    buckets: Mapping[str, int] = field(default_factory=lambda: BUCKETS)
    """Of zero_optimization, in place of what the ds_config says."""

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.data_parallel * self.tensor_parallel * self.context_parallel

    @property
    def arguments(self) -> list[str]:
        """Flags of pretrain/main.py."""
        sequences = self.micro_batch * self.accumulation * self.data_parallel
        values = {
            "ds_config": ROOT / f"ds_configs/zero{self.stage}.json",
            "precision": self.precision,
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "micro_batch": self.micro_batch,
            "global_batch_tokens": sequences * self.model.context_length,
            "activation_checkpointing": str(self.checkpointing).lower(),
            "compile": "false",
        }
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    def predicted(self, device: str) -> MemoryPlan:
        """What pretrain.plan.memory says."""
        command = command_line_of(*self.arguments)
        ds_config = read_ds_config(command.ds_config)
        ds_config["zero_optimization"] |= self.buckets
        return memory_plan(
            self.model,
            EngineSettings.from_run(command.run, ds_config, self.precision == "bf16", self.model),
            self.data_parallel,
            self.micro_batch,
            self.accumulation,
            self.tensor_parallel,
            "cuda" if device == "cuda" else "cpu",
        )

    def measured(self, trace: bool = False, timeout: float = 300) -> list[dict[str, Any]]:
        """Run it, and return what each rank measured (benchmarks/memory_session.py).

        Raises:
            RuntimeError: a rank failed; its last lines are in the message.
        """
        case = {
            "arguments": self.arguments,
            "model": self.model.to_json(),
            "zero": dict(self.buckets),
            "steps": STEPS,
            "threads": 1,
            "trace": trace,
        }
        command = ["benchmarks/memory_session.py", json.dumps(case)]
        printed = run_ranks(command, self.ranks, RETURNS_MEMORY, timeout)
        return [json.loads(output.strip().splitlines()[-1]) for output in printed]


def main() -> None:
    """Print a table in Markdown, a row as soon as it is measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--data_parallel", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--checkpointing", type=int, nargs="+", default=[0, 1], help="0, 1 or both")
    parser.add_argument("--tensor_parallel", type=int, default=1)
    parser.add_argument("--context_parallel", type=int, nargs="+", default=[1])
    parser.add_argument("--context_length", type=int, help="in place of the model's")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument(
        "--model", metavar="PRESET", help="in place of the small model; with the ds_config's own buckets"
    )
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    model, buckets = (preset(options.model), {}) if options.model else (SMALL, BUCKETS)
    if options.context_length:
        model = model.replace(context_length=options.context_length)
    rows: list[dict[str, Any]] = []
    print("| stage | dtype | DP | CP | recompute | predicted MiB | measured MiB | error | at |")
    print("|---|---|---|---|---|---|---|---|---|")
    for data_parallel, context_parallel, stage, precision, checkpointing in itertools.product(
        options.data_parallel,
        options.context_parallel,
        options.stages,
        options.precisions,
        options.checkpointing,
    ):
        case = Case(
            stage,
            precision,
            data_parallel,
            bool(checkpointing),
            options.micro_batch,
            options.accumulation,
            options.tensor_parallel,
            context_parallel,
            model,
            buckets,
        )
        ranks = case.measured(options.trace)
        plan = case.predicted("cuda" if "device" in ranks[0] else "cpu")
        measured = max(rank["allocated" if options.trace else "peak"] for rank in ranks)
        print(
            f"| {stage} | {precision} | {data_parallel} | {context_parallel} "
            f"| {'yes' if checkpointing else 'no'} | "
            f"{plan.peak / MIB:.0f} | {measured / MIB:.0f} | {plan.peak / measured - 1:+.1%} | "
            f"{plan.peak_phase} |",
            flush=True,
        )
        rows.append(
            {
                "model": options.model or "small",
                **{name: getattr(case, name) for name in SHOWN},
                "device": ranks[0].get("device", "cpu"),
                "predicted": plan.peak,
                "measured": measured,
                "phase": plan.peak_phase,
                "phases": plan.phases,
            }
        )
        write(options.out, rows)


if __name__ == "__main__":
    run_main(main)
