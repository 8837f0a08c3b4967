"""Compares the plans of one run at several ZeRO stages, tensor- and context-parallel degrees."""

from __future__ import annotations

import dataclasses

from model.errors import UserError, divisors
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import find_ds_config
from pretrain.engine.ds_config_check import read_ds_config
from pretrain.plan.run_plan import GIB, Machine, RunPlan, make_plan

STAGES = ("zero1", "zero2", "zero3")
LONG = 8192
"""From this context length on, sequences that ranks share are also compared."""


def compare(run: RunConfig, machine: Machine) -> list[str]:
    """A table with a row for each shipped ds_config of ZeRO 1 to 3 and each tensor- and context-parallel
    degree (t, c) that a node's GPUs allow; c > 1 for long contexts alone.

    The micro-batch is the run's, or the one that training would choose. A combination that training rejects
    has the reason in its row.

    Raises:
        UserError: it rejects all of them.
    """
    gpus = machine.gpus_per_node
    degrees = [(t, c) for t in divisors(gpus) for c in divisors(gpus // t)]
    if run.build_model_config().context_length < LONG and run.context_parallel == 1:
        degrees = [(t, c) for t, c in degrees if c == 1]
    lines = [
        f"{'':8}{'t':>3}{'c':>4}{'micro-batch':>13}{'accumulated':>13}{'peak GiB':>10}{'sent GB a step':>16}"
    ]
    problems: list[UserError] = []
    for name in STAGES:
        for t, c in degrees:
            try:
                shared = dataclasses.replace(run, tensor_parallel=t, context_parallel=c)
                row = _row(make_plan(shared, read_ds_config(find_ds_config(name)), machine, mfu=None))
            except UserError as error:
                problems.append(error)
                row = f"  {error}"
            lines.append(f"{name:8}{t:3}{c:4}{row}")
    if len(problems) == len(STAGES) * len(degrees):
        raise problems[0]
    return [*lines, f"{machine.usable / GIB:.1f} of {machine.memory / GIB:.1f} GiB a GPU are usable"]


def _row(plan: RunPlan) -> str:
    fits = "" if plan.fits else "  does not fit"
    batch = f"{plan.batch.micro_batch:13}{plan.batch.accumulation:13}"
    return f"{batch}{plan.memory.peak / GIB:10.2f}{plan.traffic.total / 1e9:16.2f}{fits}"
