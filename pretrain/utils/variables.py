"""Checks the environment's variables that libraries read, before a library fails over one of them.

A variable is checked where what it is for is about to be used: a cache folder of torch.compile does not
matter to a run that compiles nothing.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from model.errors import UserError, closest, shown
from pretrain.utils.cache_folders import folder_problem, private_folder_problem

SET_ASIDE: dict[str, str] = {}
"""What has been taken out of the environment until it is needed."""


@dataclass(frozen=True)
class Variable:
    """Variables of one kind."""

    use: str
    """What they are read for; see check_variables."""
    names: str
    problem: Callable[[str], str | None]
    """What a value lacks, or what would be valid; None for a valid one."""


def _one_of(*valid: str, upper: bool = False) -> Callable[[str], str | None]:
    def problem(value: str) -> str | None:
        if (value.upper() if upper else value) in valid:
            return None
        return f"give {', '.join(valid[:-1])} or {valid[-1]}{closest(value, valid)}"

    return problem


def _number(value: str) -> str | None:
    """OpenMP takes one number for each level of nesting."""
    return (
        None
        if re.fullmatch(r" *0*[1-9]\d{0,4}( *, *0*[1-9]\d{0,4})* *", value)
        else "give a whole number from 1"
    )


def _seconds(value: str) -> str | None:
    return None if re.fullmatch(r"\d{1,9}", value) else "give a whole number of seconds"


def _address(value: str) -> str | None:
    try:
        socket.getaddrinfo(value.strip(), None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a name"
        return f"it names no machine ({reason}); give the name or address of rank 0's machine"
    return None


def _interfaces(value: str) -> str | None:
    """Names with commas between them."""
    return _unknown_interfaces(value, lambda known, name: known == name)


def _prefixes(value: str) -> str | None:
    """NCCL's form: beginnings of names; after ^ those to leave out, after = whole names."""
    if value.startswith("^"):
        return None
    exact = value.startswith("=")
    return _unknown_interfaces(
        value.removeprefix("="), lambda known, name: known == name if exact else known.startswith(name)
    )


def _unknown_interfaces(value: str, same: Callable[[str, str], bool]) -> str | None:
    known = [name for _, name in socket.if_nameindex()]
    # A name may have a port behind it.
    missing = [name for name in value.split(",") if not any(same(has, name.split(":")[0]) for has in known)]
    if not missing:
        return None
    return f"{socket.gethostname()} has no interface {missing[0]!r}; it has {', '.join(known)}"


VARIABLES = (
    Variable("start", "OMP_NUM_THREADS MKL_NUM_THREADS", _number),
    Variable("start", "DS_ACCELERATOR", _one_of("cpu", "cuda")),
    Variable("start", "TORCH_DISTRIBUTED_DEBUG", _one_of("OFF", "INFO", "DETAIL", upper=True)),
    Variable("ranks", "MASTER_ADDR", _address),
    Variable("gloo", "GLOO_SOCKET_IFNAME", _interfaces),
    Variable("nccl", "NCCL_SOCKET_IFNAME", _prefixes),
    Variable("compile", "TORCHINDUCTOR_CACHE_DIR", private_folder_problem),
    Variable("compile", "TORCHINDUCTOR_COMPILE_THREADS", _number),
    Variable("compile on cuda", "TRITON_CACHE_DIR", private_folder_problem),
    Variable("extensions", "TORCH_EXTENSIONS_DIR", private_folder_problem),
    Variable(
        "hub", "HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE", folder_problem
    ),
    Variable("hub", "HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ETAG_TIMEOUT", _seconds),
    Variable("plots", "MPLCONFIGDIR", folder_problem),
    Variable("wandb", "WANDB_MODE", _one_of("online", "offline", "disabled", "shared", "dryrun", "run")),
)


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
    for variable in VARIABLES:
        for name in variable.names.split() if variable.use in uses else ():
            value = SET_ASIDE.get(name, os.environ.get(name))  # torch may have set it since
            problem = None if value is None else variable.problem(value) if value.strip() else "it is empty"
            if problem:
                raise UserError(
                    f"{name}: {shown(value)} in the environment is not valid; {problem}, or unset it"
                )
