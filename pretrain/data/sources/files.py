"""Text sources on this machine: files, folders and globs, and the built-in corpus."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.sources import readers
from pretrain.data.sources.readers import MAX_DOCUMENT_BYTES
from pretrain.data.sources.source import Document, TextSource, Unit, file_records

# Folders of the standard library that are left out: third-party code, byte code and tests (test files are
# more than half of the library and very repetitive).
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Generated when the interpreter was built: they hold this machine's paths and compiler flags. Without them
# the corpus is the same on every machine that has the same Python version.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


class FileSource(TextSource):
    """Documents in local files. Subclasses fill ``files``: pairs of (identifier, path), in order.

    Args:
        format: "auto" goes by the file's ending; see ``readers.FORMATS``.
        column: the field of JSON objects, or column of CSV and Parquet files, that holds the text.
        max_document_bytes: longer documents are left out: memory is bounded by them.
        skip_damaged: count a truncated or unreadable file of many documents, and go on with the next,
            instead of raising UserError.
        unit_bytes: size of a piece; by default a 64th of all text, between 1 and 32 MiB.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[str, Path]],
        format: str = "text",
        column: str = "text",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        skip_damaged: bool = False,
        unit_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if format not in readers.FORMATS:
            raise UserError(f"format: {format!r} is unknown; valid: {', '.join(readers.FORMATS)}")
        if max_document_bytes < 1:
            raise UserError(f"max_document_bytes: {max_document_bytes} is out of range; valid: 1 or more")
        self.name = name
        self.files = list(files)
        self.format = format
        self.limits = readers.Limits(column, max_document_bytes, skip_damaged)
        self.unit_bytes = unit_bytes

    def units(self) -> list[Unit]:
        sizes = [_file_size(path) for _, path in self.files]
        unit_bytes = self.unit_bytes or min(max(sum(sizes) // 64, 1 << 20), 32 << 20)
        units: list[Unit] = []
        group: list[tuple[str, Path, str]] = []
        group_bytes = 0

        def close_group() -> None:
            nonlocal group, group_bytes
            if group:
                key = "\n".join(key for *_, key in group)
                units.append(Unit(f"files {key}", group_bytes, ("files", [pair[:2] for pair in group])))
            group, group_bytes = [], 0

        for (identifier, path), size in zip(self.files, sizes, strict=True):
            format = readers.format_of(path, self.format)
            key = _file_key(identifier, path)
            if format == "text":
                group.append((identifier, path, key))
                group_bytes += size
                if group_bytes >= unit_bytes:
                    close_group()
                continue
            close_group()
            for start, stop, piece_bytes in readers.pieces(path, format, size, unit_bytes, self.limits):
                place = (format, identifier, path, start, stop)
                units.append(Unit(f"{format} {start}-{stop} {key}", piece_bytes, place))
        close_group()
        return units

    def read(self, unit: Unit) -> Iterator[Document | str]:
        if unit.place[0] == "files":
            for identifier, path in unit.place[1]:
                text, reason = readers.read_file(path, self.limits)
                yield reason if text is None else Document(identifier, text)
            return
        format, identifier, path, start, stop = unit.place
        for number, (text, reason) in enumerate(readers.read_piece(path, format, start, stop, self.limits)):
            yield reason if text is None else Document(f"{identifier}:{start}+{number}", text)

    def check(self) -> None:
        """Raise UserError if the text column is missing; per format with columns, the first file is checked."""
        checked = {"text", "lines", "parquet"}  # all Parquet files are checked when they are cut
        for _, path in self.files:
            if (format := readers.format_of(path, self.format)) not in checked:
                readers.check_column(path, format, self.limits)
                checked.add(format)

    def settings(self) -> str:
        return repr(self.limits.identity())

    def extent(self) -> str:
        return f"{self.name}: no usable document in {len(self.files)} files"

    def fingerprint(self) -> str:
        """Hash over identifiers, contents and settings, in order.

        For files beyond 16 MiB it covers size, time of change, and the first and last MiB, not all content.
        """
        total = hashlib.sha256()
        settings = (self.format, *self.limits.identity())
        if settings != ("text", *readers.Limits().identity()):
            total.update(repr(settings).encode())
        if self.format == "auto":
            # Older versions read these as text: the same files are another corpus now.
            formats = [readers.format_of(path, "auto") for _, path in self.files if _once_text(path)]
            if formats:
                total.update(repr(formats).encode())
        for identifier, path in self.files:
            try:
                data = _content(path)
            except OSError:
                data = b""
            # surrogateescape: file names are bytes, not always UTF-8
            total.update(
                identifier.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(data).digest()
            )
        return total.hexdigest()

    def origin(self) -> dict[str, Any]:
        return file_records(self.files)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"name": self.name, "files": len(self.files)}
        formats = {readers.format_of(path, self.format) for _, path in self.files} - {"text"}
        if formats:
            described["formats"] = sorted(formats)
        if formats - {"lines"}:
            described["column"] = self.limits.column
        return described


def _once_text(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith((".json", *(f"{end}{z}" for end in (".csv", ".tsv") for z in ("", ".gz", ".zst"))))


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _file_key(identifier: str, path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return f"{identifier} unreadable"
    return f"{identifier} {status.st_size} {status.st_mtime_ns}"


def _content(path: Path) -> bytes:
    """The bytes that represent a file's content in a fingerprint."""
    size = path.stat().st_size
    if size <= 16 << 20:
        return path.read_bytes()
    with path.open("rb") as stream:
        head = stream.read(1 << 20)
        stream.seek(-(1 << 20), os.SEEK_END)
        return b"%d %d" % (size, path.stat().st_mtime_ns) + head + stream.read()


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
    """Local text. *paths* are files, folders (searched recursively) and globs.

    The ending decides a file's format: JSON Lines (``.jsonl``, ``.ndjson``), a JSON array or JSON Lines (``.json``),
    CSV (``.csv``, ``.tsv``), Parquet (``.parquet``), else plain text, one document per file; *format* overrides it.
    *options* are those of :class:`FileSource`. ``.gz`` and ``.zst`` are decompressed.

    Hidden files and folders inside a given folder are left out; a file that is named twice is read once.
    Raises UserError for a path that does not exist or a glob that matches nothing.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        name: str = "text",
        format: str = "auto",
        **options: Any,
    ) -> None:
        files: list[tuple[str, Path]] = []
        for path_or_glob in paths:
            files += _expand(os.fspath(path_or_glob))
        seen: set[Path] = set()
        unique = []
        for identifier, path in files:
            resolved = path.resolve()
            if resolved not in seen:
                seen.add(resolved)
                unique.append((identifier, path))
        if not unique:
            raise UserError("text: no file given; valid: files, folders or globs of UTF-8 text")
        super().__init__(name, unique, format, **options)


def _expand(path_or_glob: str) -> list[tuple[str, Path]]:
    """Files behind one path or glob, as (identifier, path); identifiers do not depend on where a folder is."""
    path = Path(path_or_glob)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        files = _walk(path)
        if not files:
            raise UserError(f"text: the folder {path_or_glob!r} has no files; needed: files of UTF-8 text")
        return files
    # glob.glob: Path.glob refuses absolute patterns
    matches = sorted(glob.glob(path_or_glob, recursive=True)) if glob.has_magic(path_or_glob) else []  # noqa: PTH207
    if not matches:
        raise UserError(
            f"text: {path_or_glob!r} is not a file or folder and matches none; valid: files, folders or globs"
        )
    matched_files = [(match, Path(match)) for match in matches if Path(match).is_file()]
    if matched_files:  # "**" matches folders as well, whose files it lists too
        return matched_files
    return [pair for match in matches for pair in _expand(match)]


def _walk(
    root: Path, suffix: str = "", excluded: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()
) -> list[tuple[str, Path]]:
    """Files below *root* that end in *suffix*, as (path relative to root, path), sorted by the former."""
    matching_files: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in excluded and not name.startswith((".", *prefixes))
        ]
        for name in names:
            if name.endswith(suffix) and not name.startswith((".", *prefixes)):
                path = Path(folder, name)
                if path.is_file():
                    matching_files.append((path.relative_to(root).as_posix(), path))
    return sorted(matching_files)
