"""Describes this machine: its device, whether bf16 is fast on it, and the peak FLOP/s that MFU refers to."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from model.errors import UserError
from pretrain.runtime.environment import read_environment
from pretrain.utils.format import count_of

SHARING = "RUNS_PER_DEVICE"
"""The variable in which ``study run --parallel`` tells a run how many train in its device's memory at a
time."""
TERA = 1e12

# Dense matrix products with 16-bit inputs, in FLOP/s, without sparsity, from the makers' data sheets. The
# first pattern that matches the device's name wins, so variants stand before their family.
GPU_PEAKS_16_BIT: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500 * TERA),
    (r"\bB200\b", 2250 * TERA),
    (r"\bH200 NVL\b", 835 * TERA),
    (r"\bG?H200\b", 989 * TERA),
    (r"\bH100 NVL\b", 835 * TERA),
    (r"\bH[18]00 PCIe\b", 756 * TERA),
    (r"\bH[18]00\b", 989 * TERA),
    (r"\bA[18]00\b", 312 * TERA),
    (r"\bL40S\b", 362 * TERA),
    (r"\bL40\b", 181 * TERA),
    (r"\bL4\b", 121 * TERA),
    (r"\bA40\b", 150 * TERA),
    (r"\bA30\b", 165 * TERA),
    (r"\bA10\b", 125 * TERA),
    (r"\bRTX A6000$", 155 * TERA),
    (r"\bRTX 4090$", 165 * TERA),
    (r"\bRTX 3090$", 71 * TERA),
    (r"\bMI300X\b", 1307 * TERA),
    (r"\bMI250X?\b", 191 * TERA),  # one of the two dies of a card, which is what a rank gets
)

CPU_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


def detect_device() -> torch.device:
    """Return this rank's GPU: the only one it sees, or that of its LOCAL_RANK; the CPU where there is none.

    A batch system may show each task one GPU only (srun --gpus-per-task), which then has number 0 for all of
    them.

    Raises:
        UserError: it sees several GPUs, and its LOCAL_RANK is not one of them; DS_ACCELERATOR asks for one,
            and there is none.
    """
    if os.environ.get("DS_ACCELERATOR") == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "DS_ACCELERATOR: 'cuda' in the environment, and torch finds no GPU; give cpu, or unset it"
        )
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)
    local_rank = read_environment().local_rank
    if local_rank >= count:
        raise UserError(
            f"LOCAL_RANK: {local_rank} is not valid with {count} visible GPUs; start {count} ranks on a node "
            f"(deepspeed --num_accelerators {count}, sbatch --ntasks-per-node={count})"
        )
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device) -> str:
    """Return a description: ``"NVIDIA H200, 139.8 GiB"`` or ``"AMD EPYC, 2 cores, 2 threads"``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    cores, threads = count_of(available_cores(), "core"), count_of(torch.get_num_threads(), "thread")
    return f"{cpu_name()}, {cores}, {threads}"


def available_cores() -> int:
    """Return how many cores this process may use, which a batch system may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def supports_bf16(device: torch.device) -> tuple[bool, str]:
    """Return whether the device computes bf16 products in hardware, and why (not), for the run's log."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # A GPU that emulates bf16 also "supports" it, at a fraction of its fp32 speed.
        with torch.cuda.device(device):
            supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return supported, f"{name} has {'' if supported else 'no '}bf16 units"
    flags = [flag for flag in CPU_BF16_FLAGS if flag in _cpu_info().split()]
    if flags:
        return True, f"the CPU has {flags[0]}"
    return False, f"the CPU has neither {' nor '.join(CPU_BF16_FLAGS)}"


MEASURED = "measured"
"""First word of a measured peak's source. Such a peak varies with threads and load."""
PRODUCT_SIZES = {"cpu": 1024, "cuda": 8192}
"""Square products, m = n = k."""
PEAK_SECONDS = 0.3


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the device's peak in FLOP/s for dense matrix products in *dtype*, and the source of the value.

    For a known GPU it is the data sheet's. Otherwise matrix products are timed for a moment, on the CPU
    with the current number of threads, and the fastest counts. The measurement is cached.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = data_sheet_peak(name, dtype)
        if known is not None:
            return known, f"data sheet of {name}, dense {_name(dtype)}"
    return _measure_peak(device, dtype, torch.get_num_threads())


def data_sheet_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of the GPU called *name*, or None if it is unknown or *dtype* is not bf16.

    A slice of a GPU (MIG) is unknown: its share of the peak depends on how the GPU was cut.
    """
    if re.search(r"\bMIG\b", name):
        return None
    if dtype != torch.bfloat16:
        return None
    return next((peak for pattern, peak in GPU_PEAKS_16_BIT if re.search(pattern, name)), None)


@functools.cache
def _measure_peak(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, str]:
    """The rate of the fastest product of two square matrices."""
    size = PRODUCT_SIZES[device.type]
    # A separate generator: measuring must not move the run's random numbers.
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=generator).to(device, dtype)
    timer = Timer("torch.mm(matrix, matrix)", globals={"torch": torch, "matrix": matrix}, num_threads=threads)
    # The fastest, not the mean: the peak is what the device can do when nothing else disturbs it.
    fastest = min(timer.blocked_autorange(min_run_time=PEAK_SECONDS).times)
    where = describe_device(device) if device.type == "cuda" else count_of(threads, "CPU thread")
    source = f"{MEASURED}: the fastest {_name(dtype)} product of square matrices (n = {size}) on {where}"
    return 2 * size**3 / fastest, source


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _cpu_info() -> str:
    """Return Linux's description of the CPU; nothing on another system."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_name() -> str:
    """Return the CPU's model name, or its architecture where the system does not give one."""
    line = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return line.group(1).strip() if line else (platform.processor() or platform.machine() or "CPU")
