"""Checks variables of the environment before a library fails over one of them, where they are about to be
used, and the folders of compiled code, from which only what this user has written is loaded.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from model.errors import UserError, quote, suggest

SET_ASIDE: dict[str, str] = {}
"""What has been taken out of the environment until it is needed."""


def folder_problem(path: str) -> str | None:
    """Why nothing can be written into a folder, which is made; None if something can."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        return f"it cannot be made ({error.strerror}); give a folder that can be written"
    return None if usable else "it cannot be written; give another folder"


def private_folder_problem(path: str) -> str | None:
    """Why code must not be loaded from a folder, which is made if needed; None if only its user can write."""
    with suppress(OSError):  # the reason follows
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := folder_problem(path):
        return problem
    folder, around = Path(path).stat(), Path(path).resolve().parent.stat()
    if {folder.st_uid, Path(path).lstat().st_uid} != {os.geteuid()}:
        return "it belongs to another user; give your own folder"
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it, and code is loaded from it; remove it, or give your own folder"
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        return f"others can replace it, since they can write to {Path(path).resolve().parent}"
    return None


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
    "WANDB_MODE": ("wandb", _one_of("online", "offline", "disabled")),
}
"""What each is used for (see check_variables), and what a value lacks or what would be valid."""


def set_aside_compile_cache() -> None:
    """Take a folder for compiled code that cannot be used out of the environment, before torch is imported,
    which would make it: it is no obstacle until something is compiled."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ and private_folder_problem(os.environ[name]):
        SET_ASIDE[name] = os.environ.pop(name)


def check_variables(*uses: str) -> None:
    """Reject what the environment says of these uses, where a library would fail over it.

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


def private_cache(default: str, name: str) -> tuple[str, str | None]:
    """A folder from which code may be loaded: *default*, or else *name* in the user's cache folder.

    Returns:
        The folder, and why it is not the default, in a sentence.

    Raises:
        UserError: others can write to both.
    """
    problem = private_folder_problem(default)
    if problem is None:
        return default, None
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = str((Path(home) if home.startswith("/") else Path.home() / ".cache") / "head_schedules" / name)
    if other := private_folder_problem(folder):
        raise UserError(
            f"XDG_CACHE_HOME: compiled code cannot be kept in {quote(default)} ({problem}), nor in "
            f"{quote(folder)} ({other})"
        )
    return folder, f"compiled code is kept in {folder}, not in {quote(default)}: {problem.split(';')[0]}"


_notes: dict[str, str] = {}
"""By a temporary folder that this process was given: why."""


def keep_compiled_code_private() -> str | None:
    """Make sure that what torch.compile loads was written by this user. Before torch._dynamo is imported.

    torch keeps some of it below the temporary folder even where TORCHINDUCTOR_CACHE_DIR is set. Where others
    can write to its folder there, this process gets another temporary folder.

    Returns:
        A sentence about that, or None.

    Raises:
        UserError: see private_cache.
    """
    if (note := _notes.get(tempfile.gettempdir())) is not None:
        return note
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)  # as torch names it
    folder, note = private_cache(str(Path(tempfile.gettempdir(), name)), name)
    if note is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder).parent)
        _notes[tempfile.tempdir] = note
    return note


EXTRAS = {
    "accelerate": "eval",
    "datasets": "data",
    "gcsfs": "gcs",
    "jinja2": "study",
    "lm_eval": "eval",
    "matplotlib": "plots",
    "pandas": "study",
    "patsy": "study",
    "s3fs": "s3",
    "statsmodels": "study",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Packages that a bare install lacks, each with the extra of this project that brings it."""


def make_missing_error(package: str) -> UserError:
    """What to install to have a package of EXTRAS."""
    return UserError(f"{package}: not installed; pip install 'head-schedules[{EXTRAS[package]}]'")


def check_installed(package: str, setting: str | None = None) -> None:
    """Reject a setting, or a command, that needs a package of EXTRAS.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        missing = make_missing_error(package)
        raise missing if setting is None else UserError(f"{setting}: {missing}, or leave it out")


def explain_missing(error: BaseException) -> UserError | None:
    """What to install, if *error* is the failed import of a package in EXTRAS."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return make_missing_error(package) if package in EXTRAS else None
