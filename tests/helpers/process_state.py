"""What a library may leave changed in the process that calls it, as a mapping from names to values."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
FONT = ".ttf"  # matplotlib keeps those that it has drawn with
OUTPUTS = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2)}
"""Imported libraries keep copies of the standard streams."""
PATCHED = (
    "torch.nn.functional",
    "torch.utils.cpp_extension",
    "torch.distributed",
    "deepspeed.utils.groups",
    "deepspeed.comm.comm",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
)
"""Modules whose names libraries replace."""


def process_state() -> dict[str, Any]:
    """Everything that a caller could notice. Values compare with ``==``."""
    gc.collect()
    state: dict[str, Any] = {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "sys.path": list(sys.path),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "streams": [sys.stdin, sys.stdout, sys.stderr],
        "signal handlers": {number.name: signal.getsignal(number) for number in HANDLED},
        "warnings": [(warnings.showwarning, *map(tuple, warnings.filters))],
        "threads": settled_threads(),
        "files": open_files(),
        "random": random.getstate(),
        "switch interval": sys.getswitchinterval(),
        "umask": _umask(),
        "affinity": os.sched_getaffinity(0),
        "loggers": log_levels(),
    }
    if threading.current_thread() is threading.main_thread():
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        state["wakeup"] = fd
    if "numpy" in sys.modules:
        import numpy as np

        kind, keys, *rest = np.random.get_state(legacy=True)
        state["numpy"] = (kind, np.asarray(keys).tolist(), rest, np.geterr(), np.get_printoptions())
    if "torch" in sys.modules:
        state |= torch_state()
    if "matplotlib" in sys.modules:
        import matplotlib

        state["matplotlib"] = {
            name: dict.__getitem__(matplotlib.rcParams, name) for name in matplotlib.rcParams
        }
    return state


def torch_state() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    state = {
        "generator": torch.get_rng_state().tolist(),
        "generator's seed": torch.initial_seed(),
        "threads of torch": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.enabled,
        ),
        "sdp": (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        "mkldnn": torch.backends.mkldnn.flags,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "anomaly": torch.is_anomaly_enabled(),
        "group": dist.is_initialized(),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
    for name in PATCHED:
        if name in sys.modules:
            names = vars(sys.modules[name])
            state[f"names of {name}"] = {
                key: (id(value) if callable(value) else repr(value))
                for key, value in names.items()
                if not key.startswith("__")
            }
    for kind in (torch.nn.Module, torch.Tensor, torch.nn.Linear, torch.nn.Embedding):
        state[f"names of {kind.__name__}"] = {
            name: id(value) for name, value in vars(kind).items() if callable(value)
        }
    if "torch._dynamo" in sys.modules:
        state["dynamo"] = sys.modules["torch._dynamo"].config.recompile_limit
    if "torch._functorch.config" in sys.modules:
        state["functorch"] = sys.modules["torch._functorch.config"].ban_recompute_materialized_backward
    return state


def settled_threads(seconds: float = 2.0) -> list[str]:
    """Names of the threads, once those that are about to end have ended."""
    deadline = time.monotonic() + seconds
    while (names := sorted(t.name for t in threading.enumerate())) != [
        "MainThread"
    ] and time.monotonic() < deadline:
        time.sleep(0.05)
    return names


def open_files() -> list[str]:
    """What the process's file descriptors lead to."""
    found = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(str(number.readlink()))
    return sorted(name for name in found if not name.endswith(FONT) and name not in OUTPUTS)


def log_levels() -> dict[str, Any]:
    return {
        name: (logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters))
        for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]
        if isinstance(logger, logging.Logger)
    }


def _umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What of *before* has changed, a line each; what only *after* has was not loaded before."""
    lines = []
    for name, value in before.items():
        new = after[name]
        if isinstance(value, dict) and isinstance(new, dict):
            keys = value if name != "environment" else {**value, **new}
            lines += [
                f"{name}: {key}: {value.get(key)!r} -> {new.get(key)!r}"[:300]
                for key in keys
                if value.get(key) != new.get(key)
            ]
        elif isinstance(value, list) and value != new:
            left = (
                [v for v in new if v not in value]
                if name != "files"
                else [v for v in new if new.count(v) > value.count(v)]
            )
            gone = [v for v in value if v not in new]
            lines.append(f"{name}: new {left!r}, gone {gone!r}"[:600])
        elif value != new:
            lines.append(f"{name}: {value!r} -> {new!r}"[:200])
    return lines
