"""Restores what training changes in its process, for a program that continues after it has called ``train``.

The commands need none of it: their process ends. What importing a library changes stays (its filters of
warnings, folders on sys.path, variables that only torch reads again).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from model.errors import UserError

_training = threading.Lock()


@contextlib.contextmanager
def claim_process() -> Iterator[None]:
    """Hold this process for one training: process group, environment and generators are the whole process's.

    Raises:
        UserError: another thread trains, or a hook of a training calls it.
    """
    if not _training.acquire(blocking=False):
        raise UserError(
            "train: this process trains already, in another thread or in the hook that calls train; call it "
            "afterwards, or in a separate process (multiprocessing.get_context('spawn'))"
        )
    try:
        yield
    finally:
        _training.release()


@contextlib.contextmanager
def preserve_environment() -> Iterator[None]:
    """Put the environment's variables, and the folder of temporary files, back at the end of the block."""
    before, folder = dict(os.environ), tempfile.tempdir
    try:
        yield
    finally:
        tempfile.tempdir = folder
        for name in {*before, *os.environ}:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


@contextlib.contextmanager
def preserve_interpreter() -> Iterator[None]:
    """Put back at the end of the block: warning filters, sys.excepthook, sys.path, log levels, and the
    generators of Python and numpy."""
    import numpy as np

    hook, path = sys.excepthook, [*sys.path]
    python, numpy = random.getstate(), np.random.get_state()
    known = [log for log in logging.root.manager.loggerDict.values() if isinstance(log, logging.Logger)]
    levels = [(log, log.level) for log in (logging.root, *known)]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.excepthook, sys.path[:] = hook, path
        random.setstate(python)
        np.random.set_state(numpy)
        for log, level in levels:
            if log.level != level:
                log.setLevel(level)


@contextlib.contextmanager
def preserve_torch() -> Iterator[None]:
    """Put torch's global settings and generators back at the end of the block, and destroy the process groups
    that were made in it; a group that was there before stays.

    Inside, torch computes as in a new process: it records gradients, casts nothing automatically, makes
    float32 tensors on the CPU and multiplies them as such, whatever the caller has set in this thread.
    """
    import torch

    # Each is read, and written only where it has changed: some setters import the compiler.
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    ]
    of_a_new_process: dict[Callable[[Any], object], Any] = {
        torch.set_default_dtype: torch.float32,
        torch.set_float32_matmul_precision: "highest",
        torch.set_deterministic_debug_mode: 0,
    }
    devices: list[int] = []
    if torch.cuda.is_initialized():
        settings.append((torch.cuda.current_device, torch.cuda.set_device))
        devices = [*range(torch.cuda.device_count())]
    before = [read() for read, _ in settings]
    with contextlib.ExitStack() as inside:
        inside.callback(_write, settings, before)
        inside.enter_context(_preserve_groups())
        inside.enter_context(torch.random.fork_rng(devices))
        inside.enter_context(torch.inference_mode(False))
        inside.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                inside.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            inside.enter_context(torch.device("cpu"))
        new = [of_a_new_process.get(write, value) for (_, write), value in zip(settings, before, strict=True)]
        _write(settings, new)
        yield


def _write(settings: list[tuple[Callable[[], Any], Callable[[Any], object]]], values: list[Any]) -> None:
    for (read, write), value in zip(settings, values, strict=True):
        if read() != value:
            write(value)


@contextlib.contextmanager
def _preserve_groups() -> Iterator[None]:
    import torch.distributed as dist

    from pretrain.runtime.rendezvous import destroy_group

    world = dist.distributed_c10d._world
    own, before = not dist.is_initialized(), [*world.pg_map]
    try:
        yield
    finally:
        gc.collect()  # engines are cycles, and hold groups
        if own and dist.is_initialized():
            destroy_group()
        else:
            for group in [group for group in world.pg_map if group not in before]:
                dist.destroy_process_group(group)
