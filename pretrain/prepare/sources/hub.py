"""Text source for datasets on the Hugging Face hub, and for local folders of the same kind, streamed through
the ``datasets`` library."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import UserError
from pretrain.prepare.sources.readers import ROWS, choose_column, plain_values
from pretrain.prepare.sources.streams import MAX_DOCUMENT_BYTES, check_text
from pretrain.prepare.sources.text_source import Document, TextSource, Unit
from pretrain.utils.env_check import check_variables

# Pieces of a dataset: enough for any number of processes, few enough to list. A dataset of fewer files is cut
# at its Parquet row groups, which takes a look into every file.
MOST_UNITS = 1024


@dataclass
class HubDataset(TextSource):
    """One split of a dataset; documents are the strings of one column.

    Args:
        path: name on the hub, or local folder.
        subset: the dataset's configuration, such as "sample-10BT".
        split: such as "train".
        column: the column that holds the text; of several names, parted by commas, the first that there is.
        revision: branch, tag or commit on the hub; the newest when not given.
        max_document_bytes: longer documents are left out.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    def __post_init__(self) -> None:
        self.name = self.path if self.subset is None else f"{self.path}/{self.subset}"

    @property
    def local(self) -> bool:
        """Whether its files are on this machine."""
        return Path(self.path).exists()

    def _open(self) -> _Opened:
        return _open_dataset(self.path, self.subset, self.split, self.revision)

    def check(self) -> None:
        """Raise UserError if the dataset cannot be reached, or its text column is missing or does not hold
        text."""
        dataset = self._open().dataset
        columns = dataset.column_names
        if columns is not None and choose_column(columns, self.column) is None:
            raise UserError(
                f"column: {self.name} has no column {self.column!r}; valid: --column with one of "
                f"{', '.join(columns)}"
            )
        kind = (dataset.features or {}).get(name := self._column(dataset))
        if kind is not None and getattr(kind, "dtype", None) not in ("string", "large_string", "null"):
            raise UserError(
                f"column: {name!r} of {self.name} holds {kind}, not text; valid: a column of strings"
            )

    def _column(self, dataset: Any) -> str:
        return choose_column(dataset.column_names or (), self.column) or self.column

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
            dataset = self._open().dataset
            column = self._column(dataset)
            piece = dataset.shard(count, number, contiguous=True).select_columns([column])
            for table in piece.with_format("arrow").iter(ROWS):
                chunks = table.column(column).chunks
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
    """Hash of its content and settings."""


@lru_cache(maxsize=4)
def _open_dataset(path: str, subset: str | None, split: str, revision: str | None) -> _Opened:
    """Open a dataset, once per process."""
    check_variables("hub")
    import datasets

    datasets.disable_progress_bars()
    # Its messages about unreadable files also come as exceptions, which are reported below.
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    name = path if subset is None else f"{path} (subset {subset})"
    if path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        # The library would search the current folder and all below it, environments included.
        raise UserError(f"dataset: {path!r} is a format of files; valid: --text PATH…")
    try:
        builder = datasets.load_dataset_builder(path, subset, revision=revision)
        dataset: Any = builder.as_streaming_dataset(split=split)
        if hasattr(dataset, "reshard") and dataset.num_shards < MOST_UNITS:
            dataset = dataset.reshard()
        identity = [path, subset, split, revision, builder.hash, dataset.num_shards]
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            split_files = builder.config.data_files[split]
            identity += [list(map(str, split_files)), list(map(str, split_files.origin_metadata))]
    except Exception as error:  # no network, no such name, subset, split or file: one message for the user
        raise UserError(
            f"dataset: {name!r} cannot be opened ({_one_line(error)}); valid: builtin, a dataset on the "
            "Hugging Face hub while online (--subset, --split, --revision), a local folder, or --text PATH…"
        ) from error
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return _Opened(dataset, min(dataset.num_shards, MOST_UNITS), digest)


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
