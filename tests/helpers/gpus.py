"""Marks for tests that need GPUs; without them they are skipped, and say so."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip where fewer than *count* CUDA devices are there."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, {found} here")
