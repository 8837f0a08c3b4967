"""Compiles a model with torch.compile, and says what that needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from model.transformer import Transformer
from pretrain.runtime.hardware import detect_device

COMPILERS = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "cc", "clang")}


def find_missing_compiler(device: torch.device) -> str | None:
    """What torch.compile needs on this device and does not find, in a phrase; None if it has all."""
    names = COMPILERS.get(device.type, COMPILERS["cuda"])
    if not (os.environ.get("CXX" if device.type == "cpu" else "CC") or any(map(shutil.which, names))):
        return f"no compiler: none of {', '.join(names)} is installed"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "the Python headers are not installed (python3-dev)"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def compile_network(network: Transformer) -> None:
    """Have torch compile every block, the final norm and the loss, at their first use; parameter names do not
    change.

    Blocks with equal shapes share a graph. Each distinct shape needs its own, for training and for
    evaluation, and torch would give up after 8 of them.

    On a CPU the backward pass recomputes what needs no separate pass: the product of gate and up, and the
    norms' outputs. By default torch keeps these, since products read them; they are a quarter of what a block
    keeps, and keeping them is no faster (docs/log/speed.md). Results are bit-identical.
    """
    import torch._dynamo
    import torch._functorch.config

    if detect_device().type == "cpu":
        torch._functorch.config.ban_recompute_materialized_backward = False
    limit = 4 * len(network.layers) + 8
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for block in network.layers:
        block.compile()
    network.final_norm.compile()
    network.loss_and_residual = torch.compile(network.loss_and_residual)


def count_compiled_graphs() -> int:
    """How many graphs torch has compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
