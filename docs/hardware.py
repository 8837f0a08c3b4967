"""What the recipes need: a page of the reference, computed by the code of ``head-schedules plan``.

python docs/hardware.py        # prints the table
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pretrain.config.sources import find_ds_config, load_recipe, make_run, recipe_names  # noqa: E402
from pretrain.engine.ds_config_check import read_ds_config  # noqa: E402
from pretrain.plan.command import GPUS  # noqa: E402
from pretrain.plan.run_plan import GIB, Machine, RunPlan, make_plan  # noqa: E402
from pretrain.runtime.hardware import data_sheet_peak  # noqa: E402

MFU = 0.4
GPU = "h100"
LEAST_FLOPS = 1e17
"""Of recipes in the table; the others train on a CPU in minutes."""


def plan_recipe(recipe: str, gpus: int) -> RunPlan:
    """The plan of a recipe on one node, at ZeRO stage 2."""
    name, memory, _ = GPUS[GPU]
    machine = Machine(1, gpus, GPU, int(memory * GIB), data_sheet_peak(name, torch.bfloat16))
    return make_plan(
        make_run(load_recipe(recipe).values), read_ds_config(find_ds_config("zero2")), machine, MFU
    )


def describe_need(plan: RunPlan) -> str:
    """Two cells: GiB of a GPU, and hours."""
    assert plan.seconds_per_step is not None
    hours = f"{plan.seconds_per_step * plan.run.steps / 3600:.3g}" if plan.fits else "does not fit"
    return f"{plan.memory.peak / GIB:.0f} | {hours}"


def hardware_table() -> list[str]:
    """A row for each recipe that needs a GPU, by its FLOPs."""
    rows = []
    for recipe in recipe_names():
        if load_recipe(recipe).values.get("init_from"):  # its model is any
            continue
        one = plan_recipe(recipe, 1)
        if (flops := one.flops_per_step * one.run.steps) < LEAST_FLOPS:
            continue
        tokens = one.tokens_per_step * one.run.steps
        size = (
            f"{one.model.num_parameters() / 1e6:,.0f}M | {one.model.context_length:,} | {tokens / 1e9:.3g}B"
        )
        rows.append(
            (
                flops,
                f"| `{recipe}` | {size} | {describe_need(one)} | {describe_need(plan_recipe(recipe, 8))} |",
            )
        )
    header = (
        "| `--config` | parameters | context | tokens | GiB, 1 GPU | hours | GiB, each of 8 GPUs | hours |"
    )
    return [header, "|---|---:|---:|---:|---:|---:|---:|---:|", *(row for _, row in sorted(rows))]


def hardware_page() -> str:
    """The page."""
    return "\n".join(
        [
            "# Hardware",
            "",
            "The table shows what recipes use on H100 GPUs (80 GB), at ZeRO stage 2. All values",
            "are computed by `python docs/hardware.py`, not measured: memory as in [](../memory.md), time",
            f"from the FLOPs and an assumed model FLOPs utilization of {MFU}. The micro-batch is the largest",
            "that fits; a smaller `--micro_batch` needs less memory.",
            "",
            *hardware_table(),
            "",
            "The other recipes train on a CPU, except `continue`, which needs what its model needs. For",
            "another GPU, number of GPUs or ZeRO stage:",
            "",
            "```bash",
            "head-schedules plan --config 757m --gpu a100 --gpus_per_node 4 --ds_config zero3 --mfu 0.4",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    print("\n".join(hardware_table()))
