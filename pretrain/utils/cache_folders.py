"""Chooses folders for compiled code that only this user can write to.

Libraries load what they find there. Temporary folders are shared, and the names of caches in them are
predictable: another user may have made one first.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from model.errors import UserError, quote


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
        return "it belongs to another user; give a folder of your own"
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it, and code is loaded from it; remove it, or give a folder of your own"
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        return f"others can replace it, since they can write to {Path(path).resolve().parent}"
    return None


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


@functools.cache
def keep_compiled_code_private() -> str | None:
    """Make sure that what torch.compile loads was written by this user. Before torch._dynamo is imported.

    torch keeps some of it below the temporary folder even where TORCHINDUCTOR_CACHE_DIR is set. Where others
    can write to its folder there, this process gets another temporary folder. Only the first call does so.

    Returns:
        A sentence about that, or None.

    Raises:
        UserError: see private_cache.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)  # as torch names it
    folder, note = private_cache(str(Path(tempfile.gettempdir(), name)), name)
    if note is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder).parent)
    return note
