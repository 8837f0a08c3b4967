"""Where text comes from: sources of documents, and which of them are held out for validation.

A source is anything that yields :class:`Document` objects in a fixed order and can name itself with a
fingerprint; ``prepare.py`` knows nothing else about it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError

# Folders of the standard library that are left out: third-party code, byte code and tests (test files are
# more than half of the library and very repetitive).
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Generated when the interpreter was built: they hold this machine's paths and compiler flags. Without them
# the corpus is the same on every machine that has the same Python version.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Document:
    """One document: its text and a path or identifier that says where it came from."""

    path_or_id: str
    text: str

    def digest(self) -> bytes:
        """SHA-256 of the UTF-8 text (32 bytes): equal documents have equal digests, wherever they lie."""
        return hashlib.sha256(self.text.encode("utf-8")).digest()


class TextSource(ABC):
    """A re-iterable collection of documents in a fixed order."""

    name: str
    """Short name, part of messages and of default folder names."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        """Reason -> number of documents left out; counted anew by every pass over :meth:`documents`."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yield the usable documents; the same ones in the same order on every call."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal hash of everything that determines the documents; cheap next to tokenizing them."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What ``meta.json`` says about the source (JSON values; nothing that depends on the machine)."""


def decode_document(data: bytes) -> tuple[str | None, str]:
    """Return ``(text, "")`` for a usable UTF-8 file, else ``(None, reason)`` with the reason to skip it."""
    if not data.strip():
        return None, "empty"
    if b"\0" in data:
        return None, "binary"
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError:
        return None, "invalid_utf8"


class FileSource(TextSource):
    """Documents that are files. Subclasses fill ``files``: pairs of (identifier, path), in order."""

    def __init__(self, name: str, files: Sequence[tuple[str, Path]]) -> None:
        super().__init__()
        self.name = name
        self.files = list(files)

    def documents(self) -> Iterator[Document]:
        self.skipped = Counter()
        usable = 0
        for identifier, path in self.files:
            try:
                data = path.read_bytes()
            except OSError:
                self.skipped["unreadable"] += 1
                continue
            text, reason = decode_document(data)
            if text is None:
                self.skipped[reason] += 1
                continue
            usable += 1
            yield Document(identifier, text)
        if not usable:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
            raise UserError(
                f"{self.name}: no usable document in {len(self.files)} files ({reasons or 'no files'}); "
                "needed: files of UTF-8 text"
            )

    def fingerprint(self) -> str:
        """Hash over identifiers and contents, in order (12 MB take a few hundredths of a second)."""
        total = hashlib.sha256()
        for identifier, path in self.files:
            try:
                data = path.read_bytes()
            except OSError:
                data = b""
            # surrogateescape: file names are bytes, not always UTF-8
            total.update(
                identifier.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(data).digest()
            )
        return total.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "files": len(self.files)}


class BuiltinCorpus(FileSource):
    """The ``.py`` files of the standard library of the running interpreter: real text on every machine.

    *folder* replaces the interpreter's own library folder. Raises UserError when there is none (an embedded
    interpreter keeps its library in a zip file).
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
        files = _walk(root, ".py", EXCLUDED_FOLDERS, EXCLUDED_PREFIXES) if root.is_dir() else []
        if not files:
            raise UserError(
                f"builtin corpus: {str(root)!r} is not a folder with the standard library's .py files "
                "(zipped or absent in this interpreter); valid: an ordinary Python, or text of your own with "
                "python -m pretrain.prepare --text PATH"
            )
        super().__init__("builtin", files)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "python": platform.python_version()}


class TextFiles(FileSource):
    """Local text: every file is a document. *paths* are files, folders (searched recursively) and globs.

    Hidden files and folders inside a given folder are left out; a file that is named twice is read once.
    Raises UserError for a path that does not exist or a glob that matches nothing.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], name: str = "text") -> None:
        files: list[tuple[str, Path]] = []
        for given in paths:
            files += _expand(os.fspath(given))
        seen: set[Path] = set()
        unique = []
        for identifier, path in files:
            resolved = path.resolve()
            if resolved not in seen:
                seen.add(resolved)
                unique.append((identifier, path))
        if not unique:
            raise UserError("text: no file given; valid: files, folders or globs of UTF-8 text")
        super().__init__(name, unique)


def _expand(given: str) -> list[tuple[str, Path]]:
    """Files behind one path or glob, as (identifier, path); identifiers do not depend on where a folder
    is."""
    path = Path(given)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        files = _walk(path)
        if not files:
            raise UserError(f"text: the folder {given!r} has no files; needed: files of UTF-8 text")
        return files
    # glob.glob: Path.glob refuses absolute patterns
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else []  # noqa: PTH207
    if not matches:
        raise UserError(
            f"text: {given!r} is no file or folder and matches none; valid: files, folders or globs"
        )
    matched_files = [(match, Path(match)) for match in matches if Path(match).is_file()]
    if matched_files:  # "**" matches folders as well, whose files it lists too
        return matched_files
    return [pair for match in matches for pair in _expand(match)]


def _walk(
    root: Path, suffix: str = "", excluded: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> list[tuple[str, Path]]:
    """Files below *root* that end in *suffix*, as (path relative to root, path), sorted by the former."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in excluded and not name.startswith((".", *prefixes))
        ]
        for name in names:
            if name.endswith(suffix) and not name.startswith((".", *prefixes)):
                path = Path(folder, name)
                if path.is_file():
                    found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


@dataclass(frozen=True)
class Split:
    """Which documents are held out: those whose digest, read as a number in [0, 1), is below a threshold.

    The digest is of the text alone, so that copies of one document fall on the same side, and a document
    keeps its side when others are added.
    """

    fraction: float
    """Asked fraction of documents in the validation split."""
    threshold: int
    """A document is held out when the first 8 bytes of its digest, big-endian, are below this."""

    def is_validation(self, digest: bytes) -> bool:
        """True if the document with this digest belongs to the validation split."""
        return int.from_bytes(digest[:8], "big") < self.threshold

    @classmethod
    def choose(cls, digests: Iterable[bytes], fraction: float) -> Split:
        """The split with *fraction* held out, moved where needed so that neither side is empty.

        Raises UserError for a fraction outside (0, 1) and for fewer than two different documents.
        """
        if not 0 < fraction < 1:
            raise UserError(f"validation_fraction: {fraction} is out of range; valid: between 0 and 1")
        count, lowest, highest = 0, 2**64, -1
        for digest in digests:
            number = int.from_bytes(digest[:8], "big")
            count, lowest, highest = count + 1, min(lowest, number), max(highest, number)
        if lowest >= highest:
            raise UserError(
                f"corpus: {count} documents, none different from another; "
                "needed: at least two different documents, one of them for validation"
            )
        threshold = int(fraction * 2**64)
        return cls(fraction, min(max(threshold, lowest + 1), highest))
