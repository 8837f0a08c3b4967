"""Keeps what DeepSpeed and transformers print about themselves out of the output, but not warnings."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_guessed = False
"""Whether DS_ACCELERATOR says what this process found, and not what the user asked for."""


def environment_elsewhere() -> dict[str, str]:
    """The environment for a command that may run on another machine, such as sbatch from a node without
    GPUs."""
    return {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR" or not _guessed}


def quiet_libraries() -> None:
    """Turn off progress bars and advice of DeepSpeed and transformers; errors still appear.

    Call before either is imported.
    """
    import transformers

    quiet_deepspeed()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def import_deepspeed() -> None:
    """Import DeepSpeed, and tell it beforehand that there is no GPU, where there is none."""
    global _guessed
    if not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ:
        os.environ["DS_ACCELERATOR"] = "cpu"  # else it warns on every rank that it had to guess
        _guessed = True
    importlib.import_module("deepspeed")


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's informational lines out of the log, not warnings. Call it before DeepSpeed loads."""
    import_deepspeed()
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)


@contextlib.contextmanager
def quiet_start(wanted: bool = False) -> Iterator[None]:
    """Drop what DeepSpeed prints about its memory while an engine starts (its stage 1 with bf16 cannot be
    told not to).

    Warnings and errors go through its logger, which keeps the output it was made with, and stay.

    Args:
        wanted: whether the ds_config asks for those lines (memory_breakdown); then nothing is dropped.
    """
    with contextlib.nullcontext() if wanted else contextlib.redirect_stdout(io.StringIO()):
        yield


def show_requested_logs(ds_config: Mapping[str, Any]) -> None:
    """Let DeepSpeed print informational lines if the ds_config asks for some, once the engine is built."""
    requested = ds_config.get("wall_clock_breakdown") or ds_config.get("steps_per_print")
    requested = requested or any(
        ds_config.get(block, {}).get("enabled") for block in ("comms_logger", "flops_profiler")
    )
    if requested and "log_level" not in ds_config:
        from deepspeed.utils import set_log_level_from_string

        set_log_level_from_string("info")
