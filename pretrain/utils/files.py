"""Writes files and folders atomically: a crash leaves the old one or the new one. Also hashes files, and
recognizes the folders that commands make, so that none is filled as one of another kind.

Unfinished ones lie next to their final place under a hidden name: ``.NAME.HOST-PID``, which no other process
uses, or ``.writing_NAME`` for folders that only one process at a time may write. Whatever is put in place has
been synced: its contents, and the entry in the folder around it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any

import psutil
import xxhash
from pydantic import AfterValidator

from model.errors import UserError, quote

CHUNK_BYTES = 1 << 22


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("give a name inside the folder, without ..")
    return name


InnerPath = Annotated[str, AfterValidator(_check_inside)]
"""The type of a file's name that an untrusted file gives: relative to a folder, and not out of it."""


def file_entry(path: Path, each: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Size and hash (XXH3-128) of a file, as a checkpoint's manifest and a corpus's meta.json keep them.

    Args:
        each: as in update_from_file.
    """
    digest = xxhash.xxh3_128()
    size = update_from_file(digest, path, each)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def update_from_file(digest: Any, path: Path, each: Callable[[], object] = lambda: None) -> int:
    """Add a file's contents to a digest (of hashlib or xxhash), chunk by chunk; returns their bytes.

    Args:
        each: called for each chunk; it may raise.

    Raises:
        OSError: as open_regular.
    """
    size = 0
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            each()
    return size


OTHER_KINDS = {
    stat.S_IFDIR: "is a folder, not a file",
    stat.S_IFIFO: "is a pipe, not a file",
    stat.S_IFSOCK: "is a socket, not a file",
    stat.S_IFCHR: "is a device, not a file",
    stat.S_IFBLK: "is a device, not a file",
}


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file for reading whose end can be reached; links are followed.

    Raises:
        OSError: there is none, it cannot be read, or it is a folder, pipe, socket or device: reading those
            may wait or continue for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_other_kind(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def refuse_other_file(path: Path) -> None:
    """Raise OSError where *path* exists, links followed, and is not a regular file."""
    if os.path.lexists(path):
        _refuse_other_kind(path.stat(), path)


def _refuse_other_kind(status: os.stat_result, path: Path | str) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, OTHER_KINDS.get(kind, "is not a file"), os.fspath(path))


def read_regular(path: Path | str, most_bytes: int) -> bytes:
    """The content of a file that open_regular opens.

    Raises:
        OSError: as open_regular, or it has more than *most_bytes*.
    """
    with open_regular(path) as file:
        refuse_longer(os.fstat(file.fileno()), path, most_bytes)
        return file.read()


def read_text_or_nothing(path: Path, most_bytes: int = 1 << 26) -> str:
    """What a file holds, without spaces around it; empty if it cannot be read or is longer."""
    try:
        return read_regular(path, most_bytes).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def refuse_longer(status: os.stat_result, path: Path | str, most_bytes: int) -> None:
    """Raise OSError where a file has more than *most_bytes*."""
    if status.st_size > most_bytes:
        what = f"has {status.st_size:,} bytes, more than the {most_bytes:,} allowed"
        raise OSError(errno.EFBIG, what, os.fspath(path))


def read_tail(path: Path, size: int) -> bytes:
    """The last *size* bytes of a file, or all of a shorter one."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read()


LOCK_SECONDS = 0.1
"""Between two attempts to take a lock."""


def open_lock(path: Path | str) -> int:
    """Open a file to lock it, which is created if needed; no other user can open it, and so hold the lock.

    Returns:
        A descriptor, to be closed with os.close.

    Raises:
        OSError: it cannot be opened, is a link, or belongs to another user, who could make this process wait.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user; remove it", os.fspath(path))
    return descriptor


def wait_for_lock(descriptor: int, waiting: Callable[[], object], seconds: float = float("inf")) -> bool:
    """Lock an open file for this process alone; *waiting* is called first if another process holds it.

    The system gives the lock back when the file is closed, or its process ends in whatever way. Nothing is
    locked where the file system has no locks.

    Args:
        descriptor: what open_lock returned.
        seconds: how long to wait at most.

    Returns:
        False if another process still holds it then.
    """
    ends = time.monotonic() + seconds
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waiting()
        while time.monotonic() < ends:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(LOCK_SECONDS)
        return False
    return True


# ---------------------------------------------------------------------- to the disk


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's entries (renames, new files), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force a folder and everything in it to the disk."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(inner, name))
        sync(Path(inner))


# ---------------------------------------------------------------------- files


def temporary_path(path: Path) -> Path:
    """The hidden path where only this process writes *path* until it is complete."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a crash leaves the old content or all of *content*. Text is written as
    UTF-8."""
    with atomic_file(path) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file at; it becomes *path* after the block, and is removed after an error.

    An OSError about the hidden path, or one without a path (a full disk), is raised as one about *path*.
    An existing folder, pipe or device is not replaced: an OSError names its kind.
    """
    refuse_other_file(path)
    partial = temporary_path(path)
    try:
        yield partial
        put_file(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, os.fspath(partial)):
            error.filename = os.fspath(path)
        raise


def put_file(partial: Path, path: Path) -> None:
    """Sync a file and rename it to *path*, in place of an existing one."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files and folders in *folder* that ended processes of this machine left behind."""
    pattern = re.compile(rf"\..+\.{re.escape(os.uname().nodename)}-(\d+)")
    for path in folder.iterdir() if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and not psutil.pid_exists(int(match[1])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- folders


def copy_folder(source: str | Path, target: Path) -> None:
    """Copy a folder with its content to *target*, which does not exist yet.

    Raises:
        OSError: of the first file that could not be copied; that of shutil.copytree has no number.
    """
    Path(source).stat()  # os.walk says nothing about a folder that is not there
    for folder, _, names in os.walk(source, followlinks=True):
        inside = target / Path(folder).relative_to(source)
        inside.mkdir()
        for name in names:
            shutil.copy2(Path(folder, name), inside / name)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder around it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def output_folder(text: str) -> Path:
    """The folder that a user names for output; a link's target, if it is one.

    Raises:
        UserError: it is no folder's name, or a mount point, which no other folder can replace.
    """
    path = Path(text)
    with suppress(RuntimeError):  # no such user, or none at all: a folder of that name
        path = path.expanduser()
    if "\0" not in text and (path.name in ("", "..") or path.is_symlink()):
        path = Path(os.path.realpath(path))
    if not text or "\0" in text or not path.name or path.is_symlink():  # still: a loop
        raise UserError(f"out: {quote(text)} names no folder that can be written; give one such as hf/NAME")
    if os.path.ismount(path):
        raise UserError(f"out: {quote(text)} is a mount point; give a folder in it")
    return path


@contextmanager
def atomic_folder(target: Path, partial: Path | None = None, replace: bool = True) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes *target* after the block, and is removed after an error.

    Args:
        partial: its path until then, on the same file system; ``.writing_NAME`` by default. An existing one
            was left by a write that was interrupted, and is removed: give ``temporary_path(target)`` if
            several processes may write at once.
        replace: whether a *target* that holds something is replaced.

    Raises:
        FileExistsError: *target* holds something at the end, and is not to be replaced.
    """
    partial = partial or target.with_name(f".writing_{target.name}")
    try:
        restore_folder(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        if replace:
            put_folder(partial, target)
        else:
            _put_new_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_folder(partial: Path, target: Path) -> None:
    """Rename a synced folder to *target*. An existing *target* is set aside for that moment (see
    restore_folder)."""
    restore_folder(target)
    if os.path.lexists(target):  # a link that leads nowhere, too
        target.rename(_backup_path(target))
    try:
        partial.rename(target)
        sync(target.parent)
    finally:
        restore_folder(target)


def restore_folder(target: Path, aside: Path | None = None) -> None:
    """Undo a replacement that was cut between its two renames: what was set aside is *target* again.

    Args:
        aside: the path it was set aside at; ``.replaced_NAME`` by default. If *target* exists, it is removed.
    """
    aside = aside or _backup_path(target)
    if not os.path.lexists(target):
        if os.path.lexists(aside):
            aside.rename(target)
    elif aside.is_symlink():
        aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)


def _backup_path(target: Path) -> Path:
    return target.with_name(f".replaced_{target.name}")


def _put_new_folder(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)  # an empty folder is replaced
    except OSError as error:
        if target.is_dir() and any(target.iterdir()):
            raise FileExistsError(errno.EEXIST, "is there already", os.fspath(target)) from error
        raise
    sync(target.parent)


KINDS = {
    "run": ("a run", ("checkpoints", "decisions.json")),
    "study": ("a study", ("study.yaml",)),
    "corpus": ("a corpus", ("meta.json",)),
    "model": (
        "a Hugging Face model or tokenizer",
        ("config.json", "tokenizer_config.json", "tokenizer.json"),
    ),
}
"""What each kind is called, and the files and folders of which one is in such a folder alone."""


def detect_kinds(folder: Path) -> set[str]:
    """The keys of KINDS whose files are in *folder*; none of an empty or unknown folder, or where there is
    none."""
    return {kind for kind, (_, names) in KINDS.items() if any((folder / name).exists() for name in names)}


def refuse_other_kind(folder: Path, kind: str, option: str) -> None:
    """Reject a folder to write that is of another kind than *kind*.

    Args:
        option: the command's option that gives another folder, for the message.

    Raises:
        UserError: it names the folder's kind.
    """
    try:
        found = detect_kinds(folder)
    except OSError:  # reported where it is written
        return
    if found and kind not in found:
        what = " and ".join(KINDS[each][0] for each in KINDS if each in found)
        raise UserError(
            f"{option}: {str(folder)!r} is the folder of {what}, not of {KINDS[kind][0]}; give another "
            f"--{option}"
        )
