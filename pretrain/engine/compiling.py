"""Decides what of a run's model is compiled, what is computed in one and how attention is, and compiles it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Literal

import torch

from model.config import ModelConfig
from model.errors import UserError
from model.transformer import Fused, Transformer
from pretrain.config.run_config import RunConfig
from pretrain.runtime.hardware import detect_device

# Work of a rank, in FLOPs, from which a run on a CPU is compiled: about two minutes of two cores. Compiling takes 10 to
# 30 s; it saves a third of a small model's step and a seventh of a larger one's (docs/performance.md).
CPU_FLOPS = 5e12
BLOCKS_CONTEXT = 512
"""Longer sequences gain on an idle machine, too, but lose on a busy one, whose waiting threads sleep."""
COMPILERS = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "cc", "clang")}


def decide_compile(
    run: RunConfig,
    model: ModelConfig,
    stage: int,
    device: torch.device,
    data_parallel: int,
    saved: dict[str, Any],
    saved_device: str | None,
) -> tuple[bool, str]:
    """Decide whether the blocks, the final norm and the loss are compiled.

    A function of what is given and of what is installed: nothing is timed, so that a resumed run decides alike.

    Args:
        data_parallel: ranks that share the batch.
        saved: the settings that the checkpoint was written with; empty for a new run.
        saved_device: the kind of device that wrote it.

    Returns:
        The decision, and the reason in a phrase.
    """
    if isinstance(run.compile, bool):
        return run.compile, f"compile: {str(run.compile).lower()}"
    if stage == 3:
        return False, "not at ZeRO stage 3, whose hooks split every block"
    before = saved.get("compile")
    if isinstance(before, bool) and saved_device in (None, device.type):
        return before, "as the run began"
    missing = missing_compiler(device)
    if missing:
        return False, missing
    if device.type == "cuda":
        return True, f"ZeRO stage {stage} on a GPU"
    flops = run.steps * run.global_batch_tokens * model.flops_per_token() / data_parallel
    if flops < CPU_FLOPS:
        return False, f"{flops:.1e} FLOPs on a CPU are too few to gain by it"
    return True, f"{flops:.1e} FLOPs on a CPU"


def decide_fused(
    wanted: Fused | Literal["auto"],
    stage: int,
    device_type: str,
    compiled: bool | Literal["auto"],
    saved: dict[str, Any] | None = None,
) -> Fused:
    """Decide what the model computes in one, as Transformer's *fused* says it.

    auto: the loss with the output head; where a GPU's blocks are compiled also q, k, v and gate, up. Without a compiler
    the gradients of these products would have to be copied together, which costs what they save; on a CPU it made no
    difference (docs/performance.md).

    Args:
        saved: the settings that the checkpoint was written with; a run goes on as it began.

    Raises:
        UserError: everything in one is asked for at ZeRO stage 3.
    """
    if wanted != "auto":
        if wanted == "all" and stage == 3:
            raise UserError(
                "fused: all is not valid at ZeRO stage 3, which gathers layer by layer; give loss or none"
            )
        return wanted
    if saved:
        before: Fused = saved.get("fused", "none")  # a run from before the setting
        return "loss" if before == "all" and stage == 3 else before
    return "all" if device_type == "cuda" and stage < 3 and compiled is not False else "loss"


def decide_attention(
    wanted: Literal["auto", "blocks", "torch"],
    device_type: str,
    bf16: bool,
    context_length: int,
    saved: dict[str, Any],
) -> Literal["blocks", "torch"]:
    """Decide how attention is computed: by torch's kernels, or as model/block_attention.py does it.

    auto: blocks on a CPU in bf16 up to BLOCKS_CONTEXT tokens, where they are faster at every head dim from 16 to 384
    (docs/performance.md). In fp32 they gain little; GPUs have kernels that they would not reach.

    Args:
        saved: the settings that the checkpoint was written with; a run goes on as it began.
    """
    if wanted != "auto":
        return wanted
    if saved:
        before = saved.get("attention", "torch")  # a run from before the setting
        return "blocks" if before == "blocks" and device_type == "cpu" else "torch"
    return "blocks" if device_type == "cpu" and bf16 and context_length <= BLOCKS_CONTEXT else "torch"


def missing_compiler(device: torch.device) -> str | None:
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
    """Have torch compile every block, the final norm and the loss, at their first use; parameter names do not change.

    Blocks with equal shapes share a graph. Each distinct shape needs its own, for training and for evaluation, and
    torch would give up after 8 of them.

    On a CPU the backward pass makes again what costs no pass of its own: the product of gate and up, and the norms'
    outputs. By default torch keeps these, since products read them: a quarter of what a block keeps, and no faster
    (docs/performance.md). The bits are the same.
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


def compiled_graphs() -> int:
    """How many graphs torch has compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
