"""Compares the plans of one run at several ZeRO stages and tensor-parallel degrees."""

from __future__ import annotations

import dataclasses
import itertools

from model.errors import UserError, divisors
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import find_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.plan.run_plan import GIB, Machine, RunPlan, make_plan

STAGES = ("zero1", "zero2", "zero3")


def compare(run: RunConfig, machine: Machine) -> list[str]:
    """A table with a row for each shipped ds_config of ZeRO 1 to 3 and each degree that a node's GPUs allow.

    The micro-batch is the run's, or the one that training would choose. A combination that training rejects
    has the reason in its row.
    """
    lines = [f"{'':8}{'t':>4}{'micro-batch':>14}{'accumulated':>14}{'peak GiB':>11}{'sent GB a step':>17}"]
    for name, degree in itertools.product(STAGES, divisors(machine.gpus_per_node)):
        wider = dataclasses.replace(run, tensor_parallel=degree)
        try:
            row = _row(make_plan(wider, read_ds_config(find_ds_config(name)), machine, mfu=None))
        except UserError as error:
            row = f"  {error}"
        lines.append(f"{name:8}{degree:4}{row}")
    return [*lines, f"{machine.usable / GIB:.1f} of {machine.memory / GIB:.1f} GiB a GPU are usable"]


def _row(plan: RunPlan) -> str:
    fits = "" if plan.fits else "  does not fit"
    batch = f"{plan.batch.micro_batch:14}{plan.batch.accumulation:14}"
    return f"{batch}{plan.memory.peak / GIB:11.2f}{plan.traffic.total / 1e9:17.2f}{fits}"
