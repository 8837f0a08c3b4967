"""Device detection: GPU names against the table, CPU flags, and the measured peak."""

from __future__ import annotations

import os
import time

import pytest
import torch

from pretrain.runtime import hardware
from pretrain.runtime.hardware import data_sheet_peak, describe_device, detect_device, peak_flops

CPU = torch.device("cpu")


# Dense bf16, in TFLOP/s, of the data sheets.
GPUS = """
A100-SXM4-80GB 312, A100 80GB PCIe 312, A800-SXM4-80GB 312, H100 80GB HBM3 989, H800 989, H100 PCIe 756
H100 NVL 835, H200 989, H200 NVL 835, GH200 480GB 989, B200 2250, GB200 2500, L40S 362, L40 181, L4 121
A10 125, A40 150, GeForce RTX 4090 165
"""
KNOWN = [entry.rpartition(" ") for entry in GPUS.strip().replace("\n", ", ").split(", ")]


@pytest.mark.parametrize(("name", "tera"), [(f"NVIDIA {name}", float(tera)) for name, _, tera in KNOWN])
def test_known_gpus(name: str, tera: float) -> None:
    assert data_sheet_peak(name, torch.bfloat16) == tera * 1e12
    assert data_sheet_peak(name, torch.float32) is None


VARIANTS = ["4090 Laptop GPU", "4090 D", "3090 Ti"]
UNKNOWN = ["H100 80GB HBM3 MIG 3g.40gb", "A10G", "A1000", *(f"GeForce RTX {each}" for each in VARIANTS)]


@pytest.mark.parametrize("name", [f"NVIDIA {each}" for each in UNKNOWN])
def test_a_slice_and_a_name_that_only_begins_alike_have_no_known_peak(name: str) -> None:
    assert data_sheet_peak(name, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_cpu_peak_is_measured_once_and_says_so(dtype: torch.dtype) -> None:
    hardware._measure_peak.cache_clear()
    state = torch.get_rng_state()
    began = time.perf_counter()
    flops, source = peak_flops(CPU, dtype)
    assert time.perf_counter() - began < 10
    assert flops > 1e8
    assert source.startswith("measured: the fastest") and "n = 1024" in source and "CPU thread" in source
    assert torch.equal(torch.get_rng_state(), state)  # the run's random numbers did not move
    began = time.perf_counter()
    assert peak_flops(CPU, dtype) == (flops, source)
    assert time.perf_counter() - began < 0.01


CPUS = [
    ("flags\t\t: fpu sse avx512f avx512_bf16 amx_bf16\n", True, "the CPU has amx_bf16"),
    ("flags\t\t: fpu sse avx512_bf16\n", True, "the CPU has avx512_bf16"),
    ("flags\t\t: fpu sse avx512f\n", False, "the CPU has neither amx_bf16 nor avx512_bf16"),
    ("", False, "the CPU has neither"),
]


@pytest.mark.parametrize(("info", "supported", "reason"), CPUS)
def test_cpu_bf16(monkeypatch: pytest.MonkeyPatch, info: str, supported: bool, reason: str) -> None:
    monkeypatch.setattr(hardware, "_cpu_info", lambda: info)
    answer, text = hardware.supports_bf16(CPU)
    assert answer is supported
    assert reason in text
    assert describe_device(CPU)  # also without a name


def test_device_is_found_and_described() -> None:
    device = detect_device()
    assert device.type == "cuda" if os.environ["DS_ACCELERATOR"] == "cuda" else device == CPU
    assert describe_device(device)
    assert "core" in describe_device(CPU) and "thread" in describe_device(CPU)
