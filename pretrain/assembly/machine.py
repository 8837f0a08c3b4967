"""Applies a run's decisions to this process: threads, and folders for compiled code."""

from __future__ import annotations

import os

import torch

from pretrain.run.decisions import Decisions
from pretrain.runtime.world import World
from pretrain.utils.env_check import check_variables, keep_compiled_code_private, private_cache


def settle_machine(decisions: Decisions, world: World) -> list[str]:
    """Set the number of threads, and where this run keeps compiled code, which only this user may have
    written.

    Returns:
        Lines about that, for the user.

    Raises:
        UserError: a folder that the environment names for it, or for pictures, cannot be used.
    """
    torch.set_num_threads(decisions.threads.value)
    compiled = ("compile", f"compile on {world.device.type}") if decisions.compile.value else ()
    offloads = decisions.settings.offload_optimizer
    check_variables("plots", *compiled, *(["extensions"] if offloads else []))
    notes = [keep_compiled_code_private()] if compiled else []
    if offloads and "TORCH_EXTENSIONS_DIR" not in os.environ:
        from torch.utils.cpp_extension import get_default_build_root

        folder, note = private_cache(get_default_build_root(), "torch_extensions")
        notes.append(note)
        if note is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = folder
    return [note for note in notes if note]
