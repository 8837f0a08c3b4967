"""Chooses the largest micro-batch that fits into memory, and the accumulation steps that follow from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.parallel_plan import check_split
from pretrain.engine.batch import BatchPlan, share_batch, valid_micro_batches
from pretrain.engine.ds_config import EngineSettings
from pretrain.plan.footprint import DeviceType, rank_parameters
from pretrain.plan.memory import memory_plan, states
from pretrain.runtime.hardware import SHARING

CPU_MICRO_BATCH_TOKENS = 4096  # a larger micro-batch gains nothing on a CPU and costs memory
# Of a device's memory that a plan may use. On a GPU the rest is for what the allocator cannot reuse and for
# libraries (CUDA's context and NCCL's buffers take the fixed part); a CPU's memory is shared with everything
# else that runs.
USABLE_SHARE: dict[DeviceType, float] = {"cuda": 0.92, "cpu": 0.6}
LIBRARY_BYTES: dict[DeviceType, int] = {"cuda": 3 << 29, "cpu": 0}


def plan_batch(
    global_batch_tokens: int,
    micro_batch: int | None,
    model: ModelConfig,
    data_parallel: int,
    memory: int,
    device_type: str,
    tensor_parallel: int = 1,
    settings: EngineSettings | None = None,
) -> BatchPlan:
    """Derive the micro-batch (when None) and the accumulation steps from the global batch.

    Args:
        global_batch_tokens: tokens per optimizer step over all ranks.
        micro_batch: sequences per rank and forward pass, or None to choose the largest that fits.
        data_parallel: number of data-parallel ranks, each with the context ranks of *settings*.
        memory: bytes of one rank's device (its total, so that the same machine always makes the same choice).
        tensor_parallel: ranks that share a copy of the model, and take part in each micro-batch of it.
        settings: the other settings that memory depends on; stage 2 in bf16 when not given.

    Raises:
        UserError: on a CPU, weights and optimizer state are larger than the memory; something does not
            divide, or the ranks that share heads cannot split the micro-batch; the message lists what would.
    """
    settings = settings or EngineSettings()
    c = settings.context_parallel
    shared = c if model.classes is None else None
    sequences, per_rank = share_batch(
        global_batch_tokens, micro_batch, model.context_length, data_parallel, shared, tensor_parallel * c
    )
    device: DeviceType = "cpu" if device_type == "cpu" else "cuda"
    if device == "cpu":
        _check_states_fit(model, settings, data_parallel, memory, tensor_parallel)
    if micro_batch is None:
        limit = CPU_MICRO_BATCH_TOKENS // model.context_length if device == "cpu" else per_rank
        sizes = (data_parallel, tensor_parallel, usable_memory(memory, device), limit)
        micro_batch = find_micro_batch(per_rank, model, settings, *sizes, device)
        if micro_batch is None:  # the smallest comes closest
            valid = valid_micro_batches(per_rank, model, tensor_parallel, c, settings.grows)
            if not valid:
                raise UserError(
                    f"global_batch_tokens: {per_rank} sequences for each data-parallel rank cannot be shared "
                    f"by {tensor_parallel} tensor-parallel ranks that split heads; give a multiple of "
                    f"{model.context_length * data_parallel * tensor_parallel}"
                )
            micro_batch = valid[0]
    check_split(model, tensor_parallel, micro_batch, c)
    return BatchPlan(sequences, micro_batch, per_rank // micro_batch, data_parallel)


def find_micro_batch(
    per_rank: int,
    model: ModelConfig,
    settings: EngineSettings,
    data_parallel: int,
    tensor_parallel: int,
    usable: int,
    limit: int,
    device: DeviceType = "cuda",
) -> int | None:
    """The largest valid micro-batch of at most *limit* whose peak is at most *usable* bytes; None if there is
    none.

    Args:
        per_rank: sequences of a step that a rank reads.
    """
    degrees = tensor_parallel, settings.context_parallel
    for micro_batch in reversed(valid_micro_batches(per_rank, model, *degrees, settings.grows)):
        if micro_batch <= limit:
            sizes = (data_parallel, micro_batch, per_rank // micro_batch, tensor_parallel)
            if memory_plan(model, settings, *sizes, device).peak <= usable:
                return micro_batch
    return None


def _check_states_fit(
    model: ModelConfig, settings: EngineSettings, data_parallel: int, memory: int, tensor_parallel: int
) -> None:
    """Reject what a CPU's memory cannot hold before a batch is read: the system would kill the run without a
    message.

    A GPU reports an out-of-memory error anyway.
    """
    replicas = data_parallel * settings.context_parallel
    kept = states(rank_parameters(model, tensor_parallel), settings, replicas)
    needed = kept.device + kept.host
    if needed > memory:
        raise UserError(
            f"model: {model.num_parameters():,} parameters (d_model {model.d_model}, {model.num_layers} "
            f"layers, FFN width {max(model.ffn_widths)}) need {needed / 2**30:,.1f} GiB a rank for "
            f"weights and optimizer state, and a rank has {memory / 2**30:,.1f} GiB here; give a smaller "
            "model, or more machines and ZeRO stage 3 (head-schedules plan tells what fits)"
        )


def usable_memory(memory: int, device_type: DeviceType) -> int:
    """Bytes of a device's *memory* that a plan's peak may reach."""
    return max(0, int(memory * USABLE_SHARE[device_type]) - LIBRARY_BYTES[device_type])


def device_memory(device: torch.device, local_ranks: int = 1) -> int:
    """Bytes of one rank's device, or on a CPU of the memory that the job may use, divided among its ranks;
    of either the share of one of several concurrent runs (SHARING)."""
    text = os.environ.get(SHARING, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{SHARING}: {text!r} is not valid; give the number of runs that share the device")
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // int(text)
    import psutil

    return min(psutil.virtual_memory().total, *memory_limits()) // (max(1, local_ranks) * int(text))


def memory_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that a container or a batch system lets this process use: limits of its control groups (of both
    versions) and those around them, and of SLURM's variables. At least one number; it may exceed the machine.
    """
    limits = [sys.maxsize]
    for line in read_system_file(proc).splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inside = base / path.strip("/")  # in a container it may not exist: the container's own is the base
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(base) and (text := read_system_file(folder / name).strip()).isdigit():
                limits.append(int(text))
    megabytes, cores = (os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_CPU", "CPUS_ON_NODE"))
    if megabytes.isdigit() and cores.isdigit():
        limits.append(int(megabytes) * int(cores) << 20)
    if (megabytes := os.environ.get("SLURM_MEM_PER_NODE", "")).isdigit():
        limits.append(int(megabytes) << 20)
    return [limit for limit in limits if limit]  # SLURM's 0 is the whole node


def read_system_file(path: Path) -> str:
    """What the system says in a file; nothing where it has no such file."""
    try:
        return path.read_text("ascii")
    except (OSError, ValueError):
        return ""
