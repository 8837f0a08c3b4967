"""Patches DeepSpeed for a session, with switches and hooks that it has no setting for.

An extension's folder is locked while it is compiled by a lock of the operating system, which ends with its
process. torch's own lock is the existence of a file: a process that finds one left behind waits for ever.

DeepSpeed's objects are read in pretrain.engine.layout; a checkpoint's writer and loader are in
pretrain.checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils import cpp_extension

from model.errors import UserError
from pretrain.engine.deepspeed_logging import import_deepspeed, quiet_deepspeed
from pretrain.optim.spikes import SpikeGuard
from pretrain.utils.files import open_lock, wait_for_lock


def prepare_deepspeed() -> None:
    """Prepare DeepSpeed for a process group. Call it before pretrain.runtime.world.start_world.

    The group also works without it, but then every machine without GPUs first compiles an extension, which
    takes a minute.
    """
    quiet_deepspeed()
    import deepspeed
    from deepspeed.accelerator import cuda_accelerator, get_accelerator

    if get_accelerator().device_name() == "cpu":  # to ask for the extensions of a GPU runs nvcc for each
        # A shared-memory all-reduce for inference on CPUs, which training never calls; DeepSpeed would
        # compile it now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    elif not _are_numbers(os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        # By this library DeepSpeed asks for a device's free memory, by number only; without it, it asks
        # torch.
        cuda_accelerator.pynvml = None
    # An engine imports DeepSpeed's Muon. It is not used here, and its decorators would load torch's compiler.
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _are_numbers(devices: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names GPUs by number, not as GPU-… or MIG-…."""
    return all(device.strip().removeprefix("-").isdigit() for device in devices.split(",") if device.strip())


# Names in modules of others that a session replaces, or fills: by this code, or by DeepSpeed for good.
REPLACED = {
    "torch.nn.functional": ("linear",),
    "torch.utils.cpp_extension": ("FileBaton",),
    "torch._dynamo.config": ("recompile_limit",),
    "torch._functorch.config": ("ban_recompute_materialized_backward",),
    "deepspeed.accelerator.cuda_accelerator": ("pynvml",),
    "deepspeed.comm.comm": ("cdb", "comms_logger"),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.runtime.zero.utils": ("ZERO_SUPPORTED_OPTIMIZERS",),
    "deepspeed.utils.groups": (),  # all of its variables
}


@contextlib.contextmanager
def preserve_libraries() -> Iterator[None]:
    """Put back at the end of the block what a session replaces in torch and DeepSpeed. Imports DeepSpeed.

    The accelerator that DeepSpeed has found stays, and so do its modules.
    """
    import_deepspeed()
    for name in REPLACED:
        importlib.import_module(name)
    kept = [
        (module, name, getattr(module, name), copy.copy(getattr(module, name)))
        for module, names in ((sys.modules[name], names) for name, names in REPLACED.items())
        for name in names or [name for name, value in vars(module).items() if _is_variable(name, value)]
    ]
    comm: Any = sys.modules["deepspeed.comm.comm"]
    comm.comms_logger = type(comm.comms_logger)()  # an earlier session's would stay on
    try:
        yield
    finally:
        forget_stage_3_modules()
        for module, name, value, contents in kept:
            if isinstance(value, list):
                value[:] = contents
            elif isinstance(value, dict):
                value.clear()
                value.update(contents)
            if getattr(module, name) is not value:
                setattr(module, name, value)


def _is_variable(name: str, value: object) -> bool:
    return not (name.startswith("__") or callable(value) or isinstance(value, ModuleType))


def accept_optimizer(kind: type) -> None:
    """Let ZeRO step optimizers of a class of ours, without the warning that it is not tested."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    if kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(kind)


def count_loaded_steps(optimizer: Any) -> None:
    """Let a DeepSpeedCPUAdam resume bit-identically.

    DeepSpeed 0.19.8 multiplies the powers of the betas up step by step, in fp32 and outside the state that is
    saved (csrc/includes/cpu_adam.h, IncrementStep). After loading it would call pow() once, whose result
    differs in the last bit. So the multiplications are repeated, on tensors of one element.
    """

    def repeat(*_: Any) -> None:
        hook.remove()
        done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        import torch

        betas, eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
        unused = [torch.zeros(1) for _ in range(4)]
        for step in range(1, done + 1):
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *betas, eps, 0.0, True, *unused)

    hook = optimizer.register_step_pre_hook(repeat)


def forget_stage_3_modules() -> None:
    """Empty what DeepSpeed's stage 3 keeps for the whole process, which would hold the model of an engine
    that is gone.

    These are the stack of modules in their forward pass, whose first entry it never takes away, and the
    caches of its coordinators' methods. No engine at stage 3 may be in use.
    """
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    if offload is None or coordinator is None:
        return
    offload.FWD_MODULE_STACK.clear()
    for method in vars(coordinator.PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if callable(clear := getattr(cell.cell_contents, "cache_clear", None)):
                clear()


@contextlib.contextmanager
def guard_updates(guard: SpikeGuard) -> Iterator[None]:
    """Let *guard* reject gradient norms in this block, unless it never skips.

    The optimizers compute the global norm, the same on all ranks, and leave out the update if it is rejected.
    So at every stage a spike is treated like a non-finite gradient.
    """
    if guard.sigmas <= 0:
        yield
        return
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    modules: list[Any] = [bf16_optimizer, stage_1_and_2, stage3]
    originals = [module.is_invalid_grad_norm for module in modules]
    for module, original in zip(modules, originals, strict=True):
        module.is_invalid_grad_norm = lambda norm, original=original: (
            bool(original(norm)) or guard.spike(norm)
        )
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.is_invalid_grad_norm = original


MOST_SECONDS = 900.0
"""A compilation takes about a minute; each rank of a node waits for those before it."""


class ProcessLock:
    """Takes the place of torch.utils.file_baton.FileBaton; the processes compile one after the other.

    All but the first find everything compiled.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def try_acquire(self) -> bool:
        """Take the lock, as soon as no process holds it.

        Raises:
            UserError: another process has held it for MOST_SECONDS.
            OSError: it belongs to another user.
        """
        while True:
            self._file = open_lock(self.path)
            if not wait_for_lock(self._file, self._note_waiting, MOST_SECONDS):
                raise UserError(
                    f"TORCH_EXTENSIONS_DIR: another process has held {self.path} for {MOST_SECONDS / 60:g} "
                    "minutes; end it, or give another folder"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), Path(self.path).stat()):
                    return True
            os.close(self._file)  # its holder has removed it: others lock a new one

    def _note_waiting(self) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for a compilation that holds {self.path}", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Release the lock."""
        Path(self.path).unlink(missing_ok=True)  # programs with torch's lock would wait
        os.close(self._file)


def lock_by_process() -> None:
    """Let torch lock with these the extensions that it compiles from now on."""
    cpp_extension.FileBaton = ProcessLock  # type: ignore[misc, assignment]
