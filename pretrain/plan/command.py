"""Dry run of a training command: memory, communication and time of a rank, with no GPU and no process group.

    python -m pretrain.plan --model prism-757m --nodes 2 --gpus_per_node 8 --ds_config ds_configs/zero2.json

takes every flag of pretrain/main.py besides its own. A plan that does not fit is refused with exit code 2 and one line
that says what would fit. The arithmetic is in footprint.py, memory.py and traffic.py; this file reads flags and prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.errors import UserError, closest, run_command, shown
from model.parallel_plan import check_tensor_parallel
from pretrain.config.command_line import RECIPES, parse_command_line
from pretrain.config.run_config import RunConfig
from pretrain.engine.batch import BatchPlan, valid_micro_batches
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.memory import MemoryPlan, memory_plan
from pretrain.plan.micro_batch import plan_batch, usable_memory
from pretrain.plan.traffic import Traffic, traffic

GIB = 1 << 30
DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
MOST_OFFERS = 4
LARGEST_OPTION = 1_000_000
"""Most nodes, GPUs, GiB and TFLOP/s: more is a typing error, and its arithmetic might not end."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    """Its name in pretrain.runtime.hardware's table of peaks."""
    memory: float
    """GiB that torch can see, a little less than what is on the card."""


GPUS = {
    "a10": Gpu("A10", 22.0),
    "a100": Gpu("A100", 79.1),
    "a100-40gb": Gpu("A100", 39.3),
    "b200": Gpu("B200", 178.0),
    "gh200": Gpu("GH200", 94.5),
    "h100": Gpu("H100", 79.1),
    "h200": Gpu("H200", 139.8),
    "l4": Gpu("L4", 21.9),
    "l40s": Gpu("L40S", 44.4),
    "mi300x": Gpu("MI300X", 191.7),
    "rtx3090": Gpu("RTX 3090", 23.5),
    "rtx4090": Gpu("RTX 4090", 23.5),
}


@dataclass(frozen=True)
class Machine:
    """The nodes and GPUs that a run is planned for."""

    nodes: int
    gpus_per_node: int
    gpu: str | None
    """Key of GPUS, or None where only the memory is known."""
    memory: int
    """Bytes of one GPU."""
    peak: float | None
    """FLOP/s of one GPU in the run's precision, None if unknown."""

    @property
    def ranks(self) -> int:
        """Number of ranks, one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def usable(self) -> int:
        """Bytes that a rank's peak may reach."""
        return usable_memory(self.memory, "cuda")


@dataclass(frozen=True)
class RunPlan:
    """Everything that the command prints about a run. Bytes are of one rank."""

    run: RunConfig
    ds_config: dict[str, Any]
    """As it was read; settings holds what its "auto" became."""
    model: ModelConfig
    settings: EngineSettings
    machine: Machine
    batch: BatchPlan
    memory: MemoryPlan
    traffic: Traffic
    mfu: float

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.batch.sequences * self.model.context_length

    @property
    def flops_per_step(self) -> int:
        """FLOPs per step over all ranks, by ModelConfig.flops_per_token; recomputation is not counted."""
        return self.tokens_per_step * self.model.flops_per_token()

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per step at *mfu* of the GPUs' peak; None where the peak is not known."""
        if self.machine.peak is None:
            return None
        return self.flops_per_step / (self.mfu * self.machine.peak * self.machine.ranks)

    @property
    def fits(self) -> bool:
        """Whether a rank's peak leaves the margin that pretrain.plan.micro_batch requires."""
        return self.memory.peak <= self.machine.usable


def make_plan(run: RunConfig, ds_config: dict[str, Any], machine: Machine, bf16: bool, mfu: float) -> RunPlan:
    """Plan a run as pretrain.trainer would start it.

    Raises:
        UserError: for what the trainer would refuse: sizes that do not divide, contradicting settings.
    """
    from model.process_grid import check_world
    from pretrain.engine.compiling import decide_fused
    from pretrain.engine.ds_config import merge_ds_config

    model = run.build_model_config(run.vocab_size if run.data == "builtin" else None)
    model = run.largest_model_config(model)
    check_world(machine.ranks, run.tensor_parallel)
    check_tensor_parallel(model, run.tensor_parallel, sequence_parallel=run.sequence_parallel)
    stage = ds_config["zero_optimization"]["stage"]
    run = dataclasses.replace(run, fused=decide_fused(run.fused, stage, "cuda", run.compile))
    settings = EngineSettings.of(run, ds_config, bf16, model)
    data_parallel = machine.ranks // run.tensor_parallel
    batch = plan_batch(
        run.global_batch_tokens,
        run.micro_batch,
        model,
        data_parallel,
        machine.memory,
        "cuda",
        run.tensor_parallel,
        settings,
    )
    merge_ds_config(ds_config, run, batch, bf16, model)
    sizes = (data_parallel, batch.micro_batch, batch.accumulation, run.tensor_parallel)
    return RunPlan(
        run=run,
        ds_config=ds_config,
        model=model,
        settings=settings,
        machine=machine,
        batch=batch,
        memory=memory_plan(model, settings, *sizes),
        traffic=traffic(model, settings, *sizes),
        mfu=mfu,
    )


def what_fits(plan: RunPlan) -> list[str]:
    """List the flags that would make the plan fit, the cheapest change first.

    After a smaller micro-batch, only changes that allow a larger one than that are listed.
    """
    run, settings, t = plan.run, plan.settings, plan.run.tensor_parallel
    planned = plan.batch.micro_batch
    smaller = _largest(plan, settings, t, limit=planned - 1) or 0
    candidates: list[tuple[str, EngineSettings, int]] = []
    if not settings.checkpointing:
        changed = dataclasses.replace(settings, checkpointing=True)
        candidates.append(("--activation_checkpointing true", changed, t))
    for name in ("zero2", "zero3", "zero2_offload", "zero3_offload"):
        path = DS_CONFIGS / f"{name}.json"
        contents = json.loads(path.read_text(encoding="utf-8"))
        shipped = EngineSettings.of(run, contents, settings.bf16, plan.model)
        if (shipped.stage, shipped.offload_optimizer) > (settings.stage, settings.offload_optimizer):
            candidates.append((f"--ds_config ds_configs/{name}.json", shipped, t))
    for degree in range(t + 1, plan.machine.ranks + 1):
        if plan.machine.ranks % degree == 0 and _divides(plan.model, degree, run.sequence_parallel):
            wider = dataclasses.replace(run, tensor_parallel=degree)  # "auto" buckets follow the degree
            changed = EngineSettings.of(wider, plan.ds_config, settings.bf16, plan.model)
            candidates.append((f"--tensor_parallel {degree}", changed, degree))
    flags = [f"--micro_batch {smaller}"] if smaller else []
    for flag, changed, degree in candidates:
        micro_batch = _largest(plan, changed, degree, limit=planned) or 0
        if micro_batch > smaller:
            flags.append(flag if micro_batch == planned else f"{flag} --micro_batch {micro_batch}")
    return flags[:MOST_OFFERS]


def _largest(plan: RunPlan, settings: EngineSettings, tensor_parallel: int, limit: int) -> int | None:
    """The largest valid micro-batch of at most *limit* whose peak fits."""
    data_parallel = plan.machine.ranks // tensor_parallel
    if plan.batch.sequences % data_parallel:
        return None
    per_rank = plan.batch.sequences // data_parallel
    for micro_batch in reversed(valid_micro_batches(per_rank, plan.model, tensor_parallel)):
        if micro_batch <= limit:
            memory = memory_plan(
                plan.model, settings, data_parallel, micro_batch, per_rank // micro_batch, tensor_parallel
            )
            if memory.peak <= plan.machine.usable:
                return micro_batch
    return None


def _divides(model: ModelConfig, degree: int, sequence_parallel: bool) -> bool:
    try:
        check_tensor_parallel(model, degree, sequence_parallel=sequence_parallel)
    except UserError:
        return False
    return True


def check_fits(plan: RunPlan) -> None:
    """Refuse a plan whose peak is too large, in one line that says what would fit.

    Raises:
        UserError: it does not fit.
    """
    if plan.fits:
        return
    offers = what_fits(plan)
    settings = f"ZeRO stage {plan.settings.stage}, t = {plan.run.tensor_parallel}"
    advice = "; or ".join(offers) if offers else "more GPUs, or ones with more memory"
    raise UserError(
        f"micro_batch: {plan.batch.micro_batch} sequences of {plan.model.context_length} tokens at {settings} need "
        f"{plan.memory.peak / GIB:.1f} GiB a GPU, and {plan.machine.usable / GIB:.1f} of its "
        f"{plan.machine.memory / GIB:.1f} GiB are usable; what would fit: {advice}"
    )


# ---------------------------------------------------------------------- command


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, RunConfig, str]:
    """Parse the arguments into this command's own options, the run, and the path of the ds_config.

    Raises:
        UserError: for what pretrain.config.run_config refuses, or an option that is out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.plan",
        allow_abbrev=False,
        exit_on_error=False,
        description="Memory, communication and time of a run, without running it. Takes every flag of "
        "pretrain/main.py (its --help lists them) and these:",
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--gpus_per_node", type=int, default=1, help="GPUs, and ranks, of each (1)")
    parser.add_argument("--gpu", default="h100", help=f"one of {', '.join(GPUS)} (h100)")
    parser.add_argument(
        "--gpu_memory", type=float, metavar="GIB", help="memory of a GPU, in place of --gpu's"
    )
    parser.add_argument("--peak_tflops", type=float, help="dense peak of a GPU, in place of its data sheet's")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that the run reaches (0.4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    try:
        options, run_arguments = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UserError(shown(f"{error.argument_name}: {error.message}", limit=400, plain=True)) from None
    for name in ("nodes", "gpus_per_node", "gpu_memory", "peak_tflops"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= LARGEST_OPTION:
            raise UserError(
                f"{name}: {shown(value)} is not valid; give a positive number of at most {LARGEST_OPTION:,}"
            )
    if not 0 < options.mfu <= 1:
        raise UserError(f"mfu: {options.mfu} is not valid; give a share of the peak in (0, 1]")
    if options.gpu not in GPUS:
        raise UserError(
            f"gpu: {options.gpu!r} is unknown; give one of {', '.join(GPUS)}, or --gpu_memory and --peak_tflops"
            + closest(options.gpu, GPUS)
        )
    command = parse_command_line([*_recipe(run_arguments), *run_arguments])
    for name in ("plot_lr", "print_config"):
        if getattr(command, name):
            raise UserError(f"{name}: a plan does not do that; give --{name} to pretrain/main.py")
    return options, command.run, command.ds_config


def _recipe(arguments: list[str]) -> list[str]:
    """``--config`` for the recipe of the model's size, where none is given: prism-757m is planned with recipe 757m."""
    if any(argument == "--config" or argument.startswith("--config=") for argument in arguments):
        return []
    named = [a.split("=", 1)[1] for a in arguments if a.startswith("--model=")]
    named += [b for a, b in itertools.pairwise(arguments) if a == "--model"]
    sizes = [path.stem for path in RECIPES.glob("*.yaml")]
    size = named[-1].rsplit("-", 1)[-1] if named else ""
    return ["--config", size] if size in sizes else []


def build_machine(options: argparse.Namespace, bf16: bool) -> Machine:
    """Build the machine that the options describe."""
    import torch

    from pretrain.runtime.hardware import data_sheet_peak

    gpu = GPUS[options.gpu]
    memory = gpu.memory if options.gpu_memory is None else options.gpu_memory
    peak = data_sheet_peak(gpu.name, torch.bfloat16 if bf16 else torch.float32)
    if options.peak_tflops is not None:
        peak = options.peak_tflops * 1e12
    return Machine(options.nodes, options.gpus_per_node, options.gpu, int(memory * GIB), peak)


def use_bf16(run: RunConfig, ds_config: dict[str, Any]) -> bool:
    """Whether the run trains in bf16; "auto" is bf16, which every GPU of the table supports.

    Raises:
        UserError: ``precision`` and the ds_config contradict each other.
    """
    import torch

    from pretrain.engine.ds_config import resolve_bf16

    enabled = ds_config.get("bf16", {}).get("enabled", False)
    if run.precision == "auto" and enabled == "auto":
        return True
    return resolve_bf16(run, ds_config, torch.device("cpu"))[0]


def run_plan(arguments: list[str]) -> None:
    """Print a plan.

    Raises:
        UserError: bad input, or a plan that does not fit.
    """
    from pretrain.engine.ds_config_check import check_with_deepspeed, read_ds_config
    from pretrain.engine.quiet import quiet_deepspeed
    from pretrain.plan.report import describe, to_json

    options, run, path = read_arguments(arguments)
    ds_config = read_ds_config(path, run)
    quiet_deepspeed()
    check_with_deepspeed(path, ds_config)
    bf16 = use_bf16(run, ds_config)
    plan = make_plan(run, ds_config, build_machine(options, bf16), bf16, options.mfu)
    if options.json:
        print(json.dumps(to_json(plan), indent=2))
    else:
        print(describe(plan, Path(path).name))
    check_fits(plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is that of run_command."""
    return run_command(run_plan, arguments)
