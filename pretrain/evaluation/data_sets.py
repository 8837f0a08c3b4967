"""Saves tasks' data sets to a folder, and reads them from it on machines without internet.

DATA_DIR/Rowan/hellaswag/default/        one folder for each (hub name, configuration)
    validation/…                         as Dataset.save_to_disk writes it, or
    validation.jsonl, validation.parquet  a file for each split

Where a task also names files or a revision, the configuration is followed by a hash of those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets

from model.errors import UserError, quote
from pretrain.utils.files import atomic_folder, refuse_longer
from pretrain.utils.format import log_line

DEFAULT = "default"
CONTENT = ("data_files", "data_dir", "revision")
"""Arguments of load_dataset that choose what is in a data set."""
MOST_BYTES = 1 << 32
"""Of one file of a data set, which is held in memory."""
READERS = {".jsonl": datasets.Dataset.from_json, ".parquet": datasets.Dataset.from_parquet}


@contextmanager
def use_data_sets(data_dir: Path | None, save: bool = False) -> Iterator[None]:
    """Inside the block lm-eval's tasks load their data sets from *data_dir*; None: from the hub or its cache.

    Args:
        save: fetch those that are not in *data_dir* from the hub and save them there.

    Raises:
        UserError: a data set is not there; the message has the command that saves it.
    """
    original = datasets.load_dataset

    def load(path: str, name: str | None = None, **kwargs: Any) -> Any:
        if data_dir is None or path.startswith((".", "/")):  # a folder of this machine
            return original(path=path, name=name, **kwargs)
        folder = data_dir / path / (name or DEFAULT)
        if chosen := {key: kwargs[key] for key in CONTENT if kwargs.get(key)}:  # one path holds several then
            text = json.dumps(chosen, sort_keys=True, default=str)
            folder = folder.with_name(f"{folder.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
        if save and not folder.is_dir():
            with atomic_folder(folder) as partial:
                for split, rows in original(path=path, name=name, **kwargs).items():
                    rows.save_to_disk(str(partial / split))
            print(log_line("saved", folder))
        return read_data_set(folder)

    # lm-eval's tasks call this function and have no setting for it.
    with mock.patch.object(datasets, "load_dataset", load):
        yield


def read_data_set(folder: Path) -> Any:
    """Read the splits in *folder* into memory as a DatasetDict (the folder may be read-only).

    Raises:
        UserError: there are none, or a file has more than MOST_BYTES.
    """
    splits = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        for path in entry.iterdir() if entry.is_dir() else [entry]:
            try:
                refuse_longer(path.stat(), path, MOST_BYTES)
            except OSError as error:
                raise UserError(f"data_dir: {quote(str(path))} {error.strerror}") from None
        if (entry / "dataset_info.json").is_file():
            splits[entry.name] = datasets.load_from_disk(str(entry), keep_in_memory=True)
        elif entry.suffix in READERS:
            splits[entry.stem] = READERS[entry.suffix](str(entry), keep_in_memory=True)
    if not splits:
        raise UserError(
            f"data_dir: no data set in {folder}; on a machine with internet: head-schedules evaluate "
            "save --tasks … --data_dir DIR"
        )
    return datasets.DatasetDict(splits)
