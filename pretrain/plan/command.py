"""Dry run of a training command: memory, communication and time of a rank, with no GPU and no process group.

    head-schedules plan --config 757m --nodes 2 --gpus_per_node 8 --ds_config ds_configs/zero2.json

takes every flag of a training besides its own. A plan that does not fit is rejected with exit code 2
and a one-line error that lists what would fit. The plan itself is made in run_plan.py; this file reads flags
and prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from model.errors import UserError, quote
from pretrain.config.command_line import CommandParser, parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.config.sources import find_ds_config
from pretrain.runtime.command import run_command

LARGEST_OPTION = 1_000_000
"""Most nodes, GPUs, GiB and TFLOP/s: more is a typing error, and its arithmetic might not end."""


GPUS: dict[str, tuple[str, float, float]] = {
    "a10": ("A10", 22.0, 0.6e12),
    "a100": ("A100", 79.1, 2.039e12),
    "a100-40gb": ("A100", 39.3, 1.555e12),
    "b200": ("B200", 178.0, 8.0e12),
    "gh200": ("GH200", 94.5, 4.0e12),
    "h100": ("H100", 79.1, 3.35e12),
    "h200": ("H200", 139.8, 4.8e12),
    "l4": ("L4", 21.9, 0.3e12),
    "l40s": ("L40S", 44.4, 0.864e12),
    "mi300x": ("MI300X", 191.7, 5.3e12),
    "rtx3090": ("RTX 3090", 23.5, 0.936e12),
    "rtx4090": ("RTX 4090", 23.5, 1.008e12),
}
"""Name in pretrain.runtime.hardware's table of peaks; GiB that torch can see, a little less than what is on
the card; bytes/s of its memory by the maker's data sheet."""


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, RunConfig, str]:
    """Parse the arguments into this command's own options, the run, and the path of the ds_config.

    Raises:
        UserError: for settings that pretrain.config.run_config rejects, or an option that is out of range.
    """
    parser = CommandParser(
        prog="head-schedules plan",
        allow_abbrev=False,
        description="Memory, communication and time of a run, without running it. Takes every flag of "
        "head-schedules train (its --help lists them) and these:",
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="machines (default: 1)")
    add("--gpus_per_node", type=int, default=1, help="GPUs, and ranks, of each machine (default: 1)")
    add("--gpu", metavar="{" + ",".join(GPUS) + "}", help="kind of GPU (default: h100)")
    add("--gpu_memory", type=float, metavar="GIB", help="memory of a GPU, in place of --gpu's")
    add("--peak_tflops", type=float, help="dense peak of a GPU, in place of its data sheet's")
    add("--mfu", type=float, help="share of the peak that such a run reaches; predicts the time")
    add(
        "--rates",
        metavar="FILE",
        help="what a GPU was measured to do (benchmarks/rates.py); predicts the time",
    )
    add("--compare", action="store_true", help="compare ZeRO stages and parallel degrees in a table")
    add("--json", action="store_true", help="print one JSON object instead of the tables")
    options, run_arguments = parser.parse_known_args(list(arguments))
    for name in ("nodes", "gpus_per_node", "gpu_memory", "peak_tflops", "mfu"):
        value, most = getattr(options, name), 1 if name == "mfu" else LARGEST_OPTION
        if value is not None and not 0 < value <= most:
            raise UserError(
                f"{name}: {quote(value)} is not valid; give a positive number of at most {most:,}"
            )
    if options.gpu not in (None, *GPUS):
        raise UserError(
            f"gpu: {options.gpu!r} is unknown; give one of {', '.join(GPUS)}, or --gpu_memory and "
            "--peak_tflops"
        )
    if options.mfu is not None and options.rates is not None:
        raise UserError("rates: give --rates or --mfu, not both")
    for name in ("json", "rates", "mfu", "peak_tflops") if options.compare else ():
        if getattr(options, name):
            raise UserError(f"compare: it takes no --{name}; leave one of both out")
    command = parse_command_line(run_arguments)
    for name in ("plot_lr", "print_config"):
        if getattr(command, name):
            raise UserError(f"{name}: a plan does not do that; give --{name} to head-schedules train")
    return options, command.run, command.ds_config


def run_plan(arguments: list[str]) -> None:
    """Print a plan.

    Raises:
        UserError: bad input, or a plan that does not fit.
    """
    options, run, path = read_arguments(arguments)
    import torch

    from pretrain.engine.ds_config_check import read_ds_config
    from pretrain.plan.comparison import STAGES, compare
    from pretrain.plan.report import describe, to_json
    from pretrain.plan.run_plan import GIB, Machine, check_fits, make_plan
    from pretrain.plan.saved_run import check_continues
    from pretrain.plan.speed import assumed_rates, read_rates
    from pretrain.runtime.hardware import data_sheet_peak

    gpu, memory, bandwidth = GPUS[options.gpu or "h100"]
    if options.gpu_memory is not None:
        memory = options.gpu_memory
    # With another memory and peak it is another card, whose bandwidth is not known.
    other = options.gpu is None and None not in (options.peak_tflops, options.gpu_memory)
    name = "another card" if other else options.gpu or "h100"
    machine = Machine(options.nodes, options.gpus_per_node, name, int(memory * GIB))
    if options.compare:
        if not any(Path(path).samefile(find_ds_config(name)) for name in STAGES):
            raise UserError("compare: it compares zero1, zero2 and zero3 as they are; leave --ds_config out")
        print("\n".join(compare(run, machine)))
        return
    plan = make_plan(run, read_ds_config(path), machine, options.mfu)
    check_continues(run)
    peak = data_sheet_peak(gpu, torch.bfloat16 if plan.settings.bf16 else torch.float32)
    if options.peak_tflops is not None:
        peak = options.peak_tflops * 1e12
    rates = None
    if plan.settings.bf16:
        assumed = None if other or peak is None else assumed_rates(peak, bandwidth)
        rates = read_rates(options.rates) if options.rates else assumed
    elif options.rates:
        raise UserError("rates: they are those of bf16, and the run's precision is fp32; leave --rates out")
    machine = dataclasses.replace(plan.machine, peak=peak)
    plan = dataclasses.replace(plan, machine=machine, rates=rates)
    if options.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        print(describe(plan, Path(path).name))
    check_fits(plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_plan, arguments)
