"""Checks variables of the environment before a library fails over one of them, where they are about to be
used: a cache folder of torch.compile does not matter to a run that compiles nothing.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable

from model.errors import UserError, quote, suggest
from pretrain.utils.cache_folders import folder_problem, private_folder_problem

SET_ASIDE: dict[str, str] = {}
"""What has been taken out of the environment until it is needed."""


def _one_of(*valid: str) -> Callable[[str], str | None]:
    def problem(value: str) -> str | None:
        if value in valid:
            return None
        return f"give {', '.join(valid[:-1])} or {valid[-1]}{suggest(value, valid)}"

    return problem


def _number(value: str) -> str | None:
    """OpenMP takes one number for each level of nesting."""
    valid = re.fullmatch(r" *0*[1-9]\d{0,4}( *, *0*[1-9]\d{0,4})* *", value)
    return None if valid else "give a whole number from 1"


def _address(value: str) -> str | None:
    try:
        socket.getaddrinfo(value.strip(), None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a name"
        return f"it names no machine ({reason}); give the name or address of rank 0's machine"
    return None


_HF_CACHES = "HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE"
VARIABLES: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "OMP_NUM_THREADS": ("start", _number),
    "DS_ACCELERATOR": ("start", _one_of("cpu", "cuda")),
    "MASTER_ADDR": ("ranks", _address),
    "TORCHINDUCTOR_CACHE_DIR": ("compile", private_folder_problem),
    "TRITON_CACHE_DIR": ("compile on cuda", private_folder_problem),
    "TORCH_EXTENSIONS_DIR": ("extensions", private_folder_problem),
    **dict.fromkeys(_HF_CACHES.split(), ("hub", folder_problem)),
    "MPLCONFIGDIR": ("plots", folder_problem),
    "WANDB_MODE": ("wandb", _one_of("online", "offline", "disabled", "shared", "dryrun", "run")),
}
"""What each is used for (see check_variables), and what a value lacks or what would be valid."""


def set_aside_compile_cache() -> None:
    """Take a folder for compiled code that cannot be used out of the environment, before torch is imported,
    which would make it: it is no obstacle until something is compiled."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ and private_folder_problem(os.environ[name]):
        SET_ASIDE[name] = os.environ.pop(name)


def check_variables(*uses: str) -> None:
    """Refuse what the environment says of these uses, where a library would fail over it.

    Args:
        uses: of those in VARIABLES.

    Raises:
        UserError: the first variable that is wrong, its value, and what would be valid.
    """
    for name, (use, find_problem) in VARIABLES.items():
        value = SET_ASIDE.get(name, os.environ.get(name))  # torch may have set it since
        if use not in uses or value is None:
            continue
        if problem := find_problem(value) if value.strip() else "it is empty":
            raise UserError(f"{name}: {quote(value)} in the environment is not valid; {problem}, or unset it")
