"""Marks for tests that need GPUs; without them they are skipped, and say so. Run them with
DS_ACCELERATOR=cuda.

With REHEARSE in the environment tests for one GPU run on the CPU, which shows all that can be wrong with them
except CUDA itself (benchmarks/gpu.sh).
"""

from __future__ import annotations

import os

import pytest
import torch

REHEARSED = bool(os.environ.get("REHEARSE")) and not torch.cuda.is_available()
GPU = "cpu" if REHEARSED else "cuda"
"""Where such tests put tensors."""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip where fewer than *count* CUDA devices are there, or the tests are those of the CPU."""
    asked = os.environ.get("DS_ACCELERATOR") == "cuda"
    found = 1 if REHEARSED else torch.cuda.device_count() * asked
    hint = "" if asked or not torch.cuda.is_available() else " with DS_ACCELERATOR=cuda"
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs{hint}, {found} here")
