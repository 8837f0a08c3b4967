"""Text source for what the ``datasets`` library reads: from the Hugging Face hub or local files, streamed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from pretrain.data.sources.reading import MAX_DOCUMENT_BYTES, check_text
from pretrain.data.sources.source import Document, TextSource, Unit, file_records
from pretrain.prepare.sources.parquet import ROWS, plain_values

# Pieces of a dataset: enough for any number of processes, few enough to list. A dataset of fewer files is cut
# at its Parquet row groups, which takes a look into every file.
MOST_UNITS = 1024


@dataclass
class HubDataset(TextSource):
    """One split of a dataset; documents are the strings of one column.

    Args:
        path: name on the hub, local folder, or format such as "json" or "parquet" with *data_files*.
        subset: the dataset's configuration, such as "sample-10BT".
        split: such as "train".
        column: the column that holds the text.
        revision: branch, tag or commit on the hub; the newest when not given.
        data_files: files or globs in place of the dataset's own.
        max_document_bytes: longer documents are left out.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    data_files: Sequence[str] | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    def __post_init__(self) -> None:
        self.name = self.path if self.subset is None else f"{self.path}/{self.subset}"

    @property
    def local(self) -> bool:
        """Whether its files are on this machine."""
        if self.data_files:
            return not any("://" in name for name in self.data_files)
        return Path(self.path).exists()

    def splits(self) -> list[str]:
        """Names of the splits that the dataset's own files have."""
        return self._open().splits

    def origin(self) -> dict[str, Any]:
        if not self.local:
            return {}
        files = map(Path, self._open().files)
        return file_records([(path.name, path) for path in files if path.is_file()])

    def _open(self) -> _Opened:
        files = tuple(self.data_files) if self.data_files else None
        return _open_dataset(self.path, self.subset, self.split, self.revision, files)

    def check(self) -> None:
        """Raise UserError if the dataset cannot be reached, or its text column is missing or does not hold
        text."""
        dataset = self._open().dataset
        columns = dataset.column_names
        if columns is not None and self.column not in columns:
            raise UserError(
                f"column: {self.name} has no column {self.column!r}; valid: --column with one of "
                f"{', '.join(columns)}"
            )
        kind = (dataset.features or {}).get(self.column)
        if kind is not None and getattr(kind, "dtype", None) not in ("string", "large_string", "null"):
            raise UserError(
                f"column: {self.column!r} of {self.name} holds {kind}, not text; valid: a column of strings"
            )

    def units(self) -> list[Unit]:
        opened = self._open()
        return [
            Unit(f"hub {opened.identity} {number}/{opened.pieces}", 0, (number, opened.pieces))
            for number in range(opened.pieces)
        ]

    def read(self, unit: Unit) -> Iterator[Document | str]:
        number, count = unit.place
        rows = 0
        try:
            piece = self._open().dataset.shard(count, number, contiguous=True).select_columns([self.column])
            for table in piece.with_format("arrow").iter(ROWS):
                chunks = table.column(self.column).chunks
                for value in itertools.chain.from_iterable(map(plain_values, chunks)):
                    text, reason = check_text(value, self.max_document_bytes)
                    yield reason if text is None else Document(f"{number}/{count}:{rows}", text)
                    rows += 1
        except Exception as error:  # any error of the format, the network or the file system
            raise UserError(
                f"dataset: reading {self.name} failed in piece {number} of {count} after {rows} rows "
                f"({_one_line(error)}); the same command continues where it stopped"
            ) from error

    def settings(self) -> str:
        return f"{self.column} {self.max_document_bytes}"

    def fingerprint(self) -> str:
        """Hash over the dataset's files (on the hub: at the commit they have now) and the settings."""
        return hashlib.sha256(f"{self._open().identity} {self.settings()}".encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("subset", "split", "column", "revision")}
        return {"name": self.path, **{name: value for name, value in settings.items() if value is not None}}


class _Opened(NamedTuple):
    dataset: Any
    """Streaming."""
    pieces: int
    identity: str
    """Hash of what it is made of."""
    splits: list[str]
    """Names of all splits."""
    files: list[str]
    """Of this split."""


@lru_cache(maxsize=4)
def _open_dataset(
    path: str, subset: str | None, split: str, revision: str | None, data_files: tuple[str, ...] | None
) -> _Opened:
    """Open a dataset, once per process."""
    import datasets

    datasets.disable_progress_bars()
    # Its messages about unreadable files come as exceptions too, which are reported in one line below.
    datasets.logging.set_verbosity(logging.CRITICAL)
    name = path if subset is None else f"{path} (subset {subset})"
    if not data_files and path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        # The library would search the current folder and all below it, environments included.
        raise UserError(
            f"data_files: none given, and {path!r} is a format of files; valid: --data_files PATH…"
        )
    try:
        files = {split: list(data_files)} if data_files else None
        builder = datasets.load_dataset_builder(path, subset, data_files=files, revision=revision)
        dataset: Any = builder.as_streaming_dataset(split=split)
        if hasattr(dataset, "reshard") and dataset.num_shards < MOST_UNITS:
            dataset = dataset.reshard()
        identity = [path, subset, split, revision, builder.hash, dataset.num_shards]
        splits: list[str] = []
        names: list[str] = []
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            split_files = builder.config.data_files[split]
            identity += [list(map(str, split_files)), list(map(str, split_files.origin_metadata))]
            splits, names = list(map(str, builder.config.data_files)), list(map(str, split_files))
    except Exception as error:  # no network, no such name, subset, split or file: one message for the user
        raise UserError(
            f"dataset: {name!r} cannot be opened ({_one_line(error)}); valid: builtin, a dataset on the "
            "Hugging Face hub while online (--subset, --split, --revision), a local folder, json or parquet "
            "with --data_files, or --text PATH…"
        ) from error
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return _Opened(dataset, min(dataset.num_shards, MOST_UNITS), digest, splits, names)


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
