"""Keeps what DeepSpeed and transformers print about themselves out of the output; warnings and errors stay."""

from __future__ import annotations

import logging
import os

import torch


def quiet_libraries() -> None:
    """No progress bars and no advice from DeepSpeed and transformers; errors still appear.

    Call before either is imported. DeepSpeed only reads checkpoints here, so it need not look for a GPU.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import transformers

    quiet_deepspeed()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's informational lines out of the log; warnings and errors stay. Call it before DeepSpeed loads."""
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # told, it does not warn on every rank that it had to guess
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
