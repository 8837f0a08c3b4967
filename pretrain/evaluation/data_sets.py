"""Saves tasks' data sets to a folder, and reads them from it on machines without internet.

DATA_DIR/Rowan/hellaswag/default/        one folder for each (hub name, configuration)
    validation/…                         as Dataset.save_to_disk writes it, or
    validation.jsonl, validation.parquet  a file for each split
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.utils.files import atomic_folder, own_path, remove_leftovers
from pretrain.utils.text import labelled

DEFAULT = "default"
Load = Callable[..., Any]


def folder_of(data_dir: Path, path: str, name: str | None) -> Path:
    """The folder of the data set *path* (configuration *name*) below *data_dir*."""
    return data_dir / path / (name or DEFAULT)


def existing_data_dir(data_dir: str | None) -> Path | None:
    """*data_dir* as a path; None: the hub or its cache.

    Raises:
        UserError: it is not a folder.
    """
    if data_dir is None:
        return None
    folder = Path(data_dir)
    if not folder.is_dir():
        raise UserError(
            f"data_dir: {str(folder)!r} is not a folder; python -m pretrain.evaluation save writes one"
        )
    return folder


@contextmanager
def local_data_sets(data_dir: Path | None) -> Iterator[None]:
    """Inside the block lm-eval's tasks load their data sets from *data_dir*; None: from the hub or its cache.

    Raises:
        UserError: a data set is missing; the message has the command that saves it.
    """

    def load(original: Load, path: str, name: str | None, kwargs: dict[str, Any]) -> Any:
        if data_dir is not None:
            return read_data_set(folder_of(data_dir, path, name), path, name)
        try:
            return original(path=path, name=name, **kwargs)
        except Exception as error:  # no network, offline mode, no such data set: one answer for the user
            raise UserError(
                f"tasks: the data set {_shown(path, name)} cannot be loaded from the Hugging Face hub "
                f"({type(error).__name__}); on a machine with internet: "
                "python -m pretrain.evaluation save --tasks … --data_dir DIR, then give that folder here as "
                "data_dir"
            ) from error

    with _replaced_loader(load):
        yield


@contextmanager
def saving_data_sets(data_dir: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Inside the block every data set that a task loads is also saved to *data_dir*.

    Raises:
        UserError: a data set cannot be fetched or written.
    """

    def load(original: Load, path: str, name: str | None, kwargs: dict[str, Any]) -> Any:
        folder = folder_of(data_dir, path, name)
        if folder.is_dir():
            report(labelled("present", folder))
            return read_data_set(folder, path, name)
        try:
            data = original(path=path, name=name, **kwargs)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"tasks: the data set {_shown(path, name)} cannot be fetched from the Hugging Face hub "
                f"({type(error).__name__}: {reason:.160})"
            ) from error
        try:
            remove_leftovers(folder.parent)
            # Another process may have saved the same in the meantime.
            with (
                suppress(FileExistsError),
                atomic_folder(folder, own_path(folder), replace=False) as partial,
            ):
                for split, rows in data.items():
                    rows.save_to_disk(str(partial / split))
        except OSError as error:
            raise UserError(f"data_dir: cannot write {folder}: {error.strerror or error}") from error
        splits = ", ".join(f"{split} {len(rows):,}" for split, rows in data.items())
        report(labelled("saved", f"{folder}: {splits}"))
        return data

    with _replaced_loader(load):
        yield


def read_data_set(folder: Path, path: str, name: str | None) -> Any:
    """Read the splits in *folder* into memory as a DatasetDict (the folder may be read-only).

    Raises:
        UserError: there are none, or they cannot be read.
    """
    import datasets

    readers = {".jsonl": datasets.Dataset.from_json, ".parquet": datasets.Dataset.from_parquet}
    splits = {}
    try:
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if (entry / "dataset_info.json").is_file():
                splits[entry.name] = datasets.load_from_disk(str(entry), keep_in_memory=True)
            elif entry.suffix in readers:
                splits[entry.stem] = readers[entry.suffix](str(entry), keep_in_memory=True)
    except Exception as error:  # damaged files raise whatever their reader does
        reason = " ".join(str(error).split())
        raise UserError(
            f"data_dir: {folder} cannot be read ({type(error).__name__}: {reason:.160})"
        ) from error
    if not splits:
        raise UserError(
            f"data_dir: no data set {_shown(path, name)} there ({folder} holds no split); on a machine "
            "with internet: python -m pretrain.evaluation save --tasks … --data_dir DIR"
        )

    class Splits(datasets.DatasetDict):
        def __getitem__(self, split: Any) -> Any:
            if split not in self:
                raise UserError(
                    f"data_dir: {folder} has no split {split!r}, which lm-eval's task reads; "
                    f"there are {', '.join(self)}"
                )
            return super().__getitem__(split)

    return Splits(splits)


def _shown(path: str, name: str | None) -> str:
    return repr(path) + (f" ({name})" if name else "")


@contextmanager
def _replaced_loader(load: Callable[[Load, str, str | None, dict[str, Any]], Any]) -> Iterator[None]:
    """Replace datasets.load_dataset, which lm-eval's tasks call and have no setting for."""
    import datasets

    original = datasets.load_dataset

    def replacement(path: str, name: str | None = None, **kwargs: Any) -> Any:
        return load(original, path, name, kwargs)

    datasets.load_dataset = replacement
    try:
        yield
    finally:
        datasets.load_dataset = original
