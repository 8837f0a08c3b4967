"""Text source for local files of any kind: JSON Lines, JSON arrays, CSV, Parquet, plain text; compressed or
not."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.prepare.sources import readers
from pretrain.prepare.sources.plain_files import (
    NamedFile,
    PlainFiles,
    describe_non_file,
    file_key,
    file_size,
    files_below,
)
from pretrain.prepare.sources.streams import (
    BOM,
    COMPRESSED,
    DAMAGE,
    MAX_DOCUMENT_BYTES,
    check_beginning,
    make_limit_error,
    open_stream,
    strip_compression,
)
from pretrain.prepare.sources.text_source import Document, Unit

_ENDINGS = {
    ".ndjson": "jsonl",
    **{f".{format}": format for format in ("json", "jsonl", "csv", "tsv", "parquet")},
}
_UNREAD = (
    *(".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".lzma", ".br", ".z"),
    *(".zstd", ".gzip", ".bzip2", ".snappy", ".lzo", ".sz"),
)
"""Archives and compression that are not read."""
_RECORDS_LOOKED_AT = 100


class TextFiles(PlainFiles):
    """Local text. *paths* are files, folders (searched recursively) and globs.

    The ending decides a file's format: JSON Lines (``.jsonl``, ``.ndjson``), a JSON array or JSON Lines
    (``.json``), CSV (``.csv``, ``.tsv``), Parquet (``.parquet``), else plain text, one document per file;
    *format* overrides it: csv reads ``.tsv`` as RFC 4180 does, tsv takes its quotes as text. ``.gz``,
    ``.bz2``, ``.xz`` and ``.zst`` are decompressed. Hidden files and folders
    inside a given folder are left out; links are followed, and a file that is named twice is read once.

    Args:
        column: the field of JSON objects, or column of CSV and Parquet files, that holds the text; of
            several names, parted by commas, the first that there is.
        skip_damaged: count a truncated or damaged file of many documents, take what can be read of it, and
            continue with the next, instead of raising UserError.
        max_document_bytes, unit_bytes: see PlainFiles.

    Raises:
        UserError: a path that does not exist or leads to no file, a pipe or device in a folder, a glob that
            matches nothing, settings out of range.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        name: str = "text",
        format: str = "auto",
        column: str = "text",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        skip_damaged: bool = False,
        unit_bytes: int | None = None,
    ) -> None:
        files: dict[str, NamedFile] = {}
        for path in paths:
            for identifier, file in _expand(os.fspath(path)):
                _refuse_archive(file, named=os.fspath(file) == os.fspath(path))
                files.setdefault(os.path.realpath(file), (identifier, file))
        super().__init__(name, list(files.values()), max_document_bytes, unit_bytes)
        self.format, self.column, self.skip_damaged = format, column, skip_damaged

    def _format(self, file: NamedFile) -> str:
        return detect_format(file[1], self.format)

    def units(self) -> list[Unit]:
        units: list[Unit] = []
        for format, files in itertools.groupby(self.files, self._format):
            if format == "text":
                units += self.group_units(files)
                continue
            for file in files:
                for start, stop, size in self._cut(file, format):
                    key = f"{format} {start}-{stop} {file_key(file)}"
                    units.append(Unit(key, size, (format, file, start, stop)))
        return units

    def _cut(self, file: NamedFile, format: str) -> Sequence[tuple[int, int | None, int]]:
        """Start, stop and bytes of each piece of a file: offsets of bytes, or for Parquet numbers of row
        groups.

        A compressed file, a JSON array and a CSV file are one piece (0, None): a comma or a line end does not
        say whether it lies inside a string.
        """
        path, size, step = file[1], file_size(file), self.unit_bytes
        if format == "parquet":
            with self._damage_to(path):
                return readers.cut_row_groups(path, self.column, step)
            return [(0, 0, 0)]  # read finds the damage again, and counts it
        if format in ("lines", "jsonl") and not path.name.lower().endswith(COMPRESSED) and size > step:
            return [
                (start, min(start + step, size), min(step, size - start)) for start in range(0, size, step)
            ]
        return [(0, None, size)]

    def read(self, unit: Unit) -> Iterator[Document | str]:
        if unit.place[0] == "files":
            yield from super().read(unit)
            return
        format, (identifier, path), start, stop = unit.place
        records = readers.read_piece(path, format, start, stop, self.column, self.max_document_bytes)
        with self._damage_to(path):
            for number, (text, reason) in enumerate(records):
                yield reason if text is None else Document(f"{identifier}:{start}+{number}", text)
            return
        yield "damaged_file"

    def check(self) -> None:
        """Raise UserError if the text column is missing from the beginning of the first file of a format, or
        the beginning of a file shows that it is not read.

        All Parquet files are checked when they are cut.
        """
        for _, path in self.files:
            format = detect_format(path, self.format)
            if format != "parquet" and (format != "text" or path.name.lower().endswith(COMPRESSED)):
                check_beginning(path, records=format != "text")
        # Of files with equal formats the last one counts.
        first = {self._format(file): file[1] for file in reversed(self.files)}
        for format in first.keys() - {"text", "lines", "parquet"}:
            path = first[format]
            records = readers.read_piece(path, format, 0, None, self.column, self.max_document_bytes)
            reasons = set()
            with self._damage_to(path):
                reasons = {reason for _, reason in itertools.islice(records, _RECORDS_LOOKED_AT)}
            if reasons == {"invalid_json"} and not self.skip_damaged:
                raise UserError(
                    f"text: {str(path)!r} does not begin with JSON; give an object per line, or an array of "
                    "objects; --format text takes a file as one text"
                )
            if reasons == {"missing_column"}:
                fields = ", ".join(" ".join(name.split())[:60] for name in readers.field_names(path, format))
                raise UserError(
                    f"column: the records of {str(path)!r} have no {self.column!r}; valid: --column with one "
                    f"of {fields or 'their fields'}{readers.SEVERAL}; --format text takes a file as one text"
                )

    @contextlib.contextmanager
    def _damage_to(self, path: Path) -> Iterator[None]:
        """Turn damage to a file of many documents into a UserError, or pass it over when asked to."""
        try:
            yield
        except UserError:
            raise
        except (*DAMAGE, MemoryError) as error:
            if limit := make_limit_error(path, error):
                raise limit from error
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            if not self.skip_damaged:
                raise UserError(
                    f"text: {str(path)!r} is truncated or damaged ({reason}); replace it (what is "
                    "tokenized already is kept), or begin again with --skip_damaged to take what can be read"
                ) from error

    def settings(self) -> str:
        return repr((self.format, self.column, self.max_document_bytes, self.skip_damaged))

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        formats = set(map(self._format, self.files))
        if formats - {"text"}:
            described["formats"] = sorted(formats)
        if formats - {"lines", "text"}:
            described["column"] = self.column
        return described


def detect_format(path: Path, asked: str) -> str:
    """The format of a file, never "auto": *asked*, or if that is "auto" by its ending (``.json``: its
    beginning too)."""
    if asked != "auto":
        return readers.PLAIN_TSV if asked == "tsv" else asked
    name = strip_compression(path.name)
    format = _ENDINGS.get(Path(name).suffix, "text")
    if format == "parquet" and name != path.name.lower():
        return "text"  # Parquet files are compressed inside, and are not read as a stream
    if format == "json":
        with contextlib.suppress(*DAMAGE), open_stream(path) as stream:
            head = stream.read(100).removeprefix(BOM).lstrip()
            return "json" if head.startswith(b"[") else "jsonl"
        return "jsonl"  # whose reader finds the damage and reports it
    return format


def _refuse_archive(path: Path, named: bool) -> None:
    """Raise UserError for text in an archive or a compression that is not read.

    Args:
        named: whether the user has given this path. In a folder, archives of anything are left out as binary.
    """
    inner = strip_compression(path.name)
    ending, before = Path(inner).suffix, Path(Path(inner).stem).suffix
    hidden = ending == ".parquet" and inner != path.name.lower()  # it is no stream
    if hidden or (ending in _UNREAD and (named or before in (*_ENDINGS, ".txt"))):
        raise UserError(
            f"text: {str(path)!r} is an archive, or compressed in a way that is not read; unpack it (text is "
            f"read from {', '.join(COMPRESSED)})"
        )


def _expand(path_or_glob: str) -> list[NamedFile]:
    """Files behind one path or glob, as (identifier, path); identifiers do not depend on where a
    folder is."""
    path = Path(path_or_glob)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        files = files_below(path, all_of_it=True)
        if not files:
            raise UserError(f"text: the folder {path_or_glob!r} has no files; needed: files of UTF-8 text")
        return files
    if os.path.lexists(path):
        raise describe_non_file(path)
    matches = []
    if glob.has_magic(path_or_glob):  # Path.glob rejects absolute patterns
        matches = sorted(glob.glob(path_or_glob, recursive=True))  # noqa: PTH207
    if not matches:
        raise UserError(
            f"text: {path_or_glob!r} is not a file or folder and matches none; valid: files, folders or globs"
        )
    if others := [path for path in map(Path, matches) if not (path.is_file() or path.is_dir())]:
        raise describe_non_file(others[0])
    found = [(match, Path(match)) for match in matches if Path(match).is_file()]
    if not (found and Path(path_or_glob).name == "**"):  # all files below, and the folders that hold them
        folders = [Path(match) for match in matches if Path(match).is_dir()]
        found += [pair for folder in folders for pair in files_below(folder, all_of_it=True)]
    return found or _expand(matches[0])
