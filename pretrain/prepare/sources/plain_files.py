"""Text files on this machine, a document a file, and the built-in corpus."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.prepare.sources.streams import MAX_DOCUMENT_BYTES, read_file
from pretrain.prepare.sources.text_source import Document, TextSource, Unit, file_sample
from pretrain.utils.files import OTHER_KINDS

# Folders of the standard library that are left out: third-party code, byte code and tests (test files are
# more than half of the library and very repetitive).
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Generated when the interpreter was built: they hold this machine's paths and compiler flags. Without them
# the corpus is the same on every machine that has the same Python version.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")

NamedFile = tuple[str, Path]
"""An identifier, and where the file is."""


class PlainFiles(TextSource):
    """Local text files, each of which is a document. Compressed ones
    (``.gz``, ``.bz2``, ``.xz``, ``.zst``) are decompressed.

    Args:
        files: in order.
        max_document_bytes: longer documents are left out: memory is bounded by them.
        unit_bytes: size of a piece; by default a 64th of all text, between 1 and 32 MiB.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[NamedFile],
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        unit_bytes: int | None = None,
    ) -> None:
        self.name, self.files, self.max_document_bytes = name, list(files), max_document_bytes
        size = sum(map(file_size, self.files))
        self.unit_bytes = unit_bytes or min(max(size // 64, 1 << 20), 32 << 20)

    def units(self) -> list[Unit]:
        return self.group_units(self.files)

    def group_units(self, files: Iterable[NamedFile]) -> list[Unit]:
        """Neighbouring files in pieces of about ``unit_bytes``."""
        files = list(files)
        before = itertools.accumulate(map(file_size, files), initial=0)
        groups = itertools.groupby(zip(files, before, strict=False), lambda pair: pair[1] // self.unit_bytes)
        units = []
        for _, pairs in groups:
            group = [file for file, _ in pairs]
            keys = "\n".join(map(file_key, group))
            units.append(Unit(f"files {keys}", sum(map(file_size, group)), ("files", group)))
        return units

    def read(self, unit: Unit) -> Iterator[Document | str]:
        for identifier, path in unit.place[1]:
            text, reason = read_file(path, self.max_document_bytes)
            yield reason if text is None else Document(identifier, text)

    def fingerprint(self) -> str:
        """Hash over settings, identifiers and contents (of large files: size, time of change, and
        both ends)."""
        total = hashlib.sha256(self.settings().encode())
        for identifier, path in self.files:
            try:
                data = file_sample(path)
                if (status := path.stat()).st_size > len(data):
                    data = b"%d %d" % (status.st_size, status.st_mtime_ns) + data
            except OSError:
                data = b""
            # surrogateescape: file names are bytes, not always UTF-8
            name = identifier.encode("utf-8", "surrogateescape")
            total.update(name + b"\0" + hashlib.sha256(data).digest())
        return total.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "files": len(self.files)}


def file_size(file: NamedFile) -> int:
    """Bytes of a file; 0 if it cannot be read."""
    try:
        return file[1].stat().st_size
    except OSError:
        return 0


def file_key(file: NamedFile) -> str:
    """Identifies a file and its content: changes when it is changed."""
    identifier, path = file
    try:
        status = path.stat()
    except OSError:
        return f"{identifier} unreadable"
    return f"{identifier} {status.st_size} {status.st_mtime_ns}"


class BuiltinCorpus(PlainFiles):
    """The ``.py`` files of the standard library of the running interpreter: real text on every machine.

    *folder* replaces the interpreter's own library folder. Raises UserError when there is none (an embedded
    interpreter keeps its library in a zip file).
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, max_document_bytes: int = MAX_DOCUMENT_BYTES
    ) -> None:
        root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
        files = files_below(root, ".py", EXCLUDED_FOLDERS, EXCLUDED_PREFIXES) if root.is_dir() else []
        if not files:
            raise UserError(
                f"builtin corpus: {str(root)!r} is not a folder with the standard library's .py files "
                "(zipped or absent in this interpreter); valid: an ordinary Python, or your own text with "
                "head-schedules prepare --text PATH"
            )
        super().__init__("builtin", files, max_document_bytes)

    def settings(self) -> str:
        return "" if self.max_document_bytes == MAX_DOCUMENT_BYTES else str(self.max_document_bytes)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "python": platform.python_version()}


def files_below(
    root: Path,
    suffix: str = "",
    excluded: frozenset[str] = frozenset(),
    prefixes: tuple[str, ...] = (),
    all_of_it: bool = False,
) -> list[NamedFile]:
    """Files below *root* that end in *suffix*, as (path relative to root, path), sorted by the former.

    Args:
        excluded: names of folders that are left out.
        prefixes: files and folders that begin like this are left out, and hidden ones.
        all_of_it: follow links to folders, too, into each folder once, and leave nothing else out.

    Raises:
        UserError: with *all_of_it*, something there is neither a file nor a folder.
        OSError: with *all_of_it*, a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        if all_of_it:
            raise error

    matching_files: list[NamedFile] = []
    seen: set[str] = set()
    tops = [root]
    for top in tops:  # grows
        for folder, subfolders, names in os.walk(top, onerror=refuse):
            real = os.path.realpath(folder)
            subfolders[:] = [
                name
                for name in subfolders
                if real not in seen and name not in excluded and not name.startswith((".", *prefixes))
            ]
            paths = [Path(folder, name) for name in (names if real not in seen else ())]
            seen.add(real)
            tops += [
                Path(folder, name) for name in subfolders if all_of_it and Path(folder, name).is_symlink()
            ]
            for path in paths:
                if path.name.endswith(suffix) and not path.name.startswith((".", *prefixes)):
                    if path.is_file():
                        matching_files.append((path.relative_to(root).as_posix(), path))
                    elif all_of_it:
                        raise describe_non_file(path)
    return sorted(matching_files)


def describe_non_file(path: Path) -> UserError:
    """The message about a path that leads to something else than a file or folder, or to nothing."""
    try:
        problem = OTHER_KINDS.get(stat.S_IFMT(path.stat().st_mode), "is not a file")
    except OSError as error:
        problem = f"leads to no file ({error.strerror})"
    return UserError(
        f"text: {str(path)!r} {problem}; valid: files, links to files, and pipes that are named one by one"
    )
