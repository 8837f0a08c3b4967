"""Makes a corpus folder from a text source and a tokenizer, written once and atomically.

    OUT/training.bin .idx, validation.bin .idx   Megatron format; every document ends with its token
    OUT/tokenizer/                               what load_tokenizer reads
    OUT/training_counts.npy                      how often each token occurs in the training split
    OUT/meta.json                                what is in the folder and what it was made from
    OUT/document_lengths.png                     on request

The same source and settings give byte-identical folders, whatever the number of processes and however often the work
was interrupted. It has three steps: set up (tokenizer, list of units), tokenize the units into parts, assemble the
parts. Finished parts lie in ``.OUT.partial-parts`` until the folder exists, so the disk must hold the tokens twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from pretrain.data.corpus import FORMAT_VERSION, META_FILE
from pretrain.data.indexed import token_dtype
from pretrain.data.sources.files import BuiltinCorpus
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.sources.with_validation import WithValidation
from pretrain.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    tokenizer_hash,
)
from pretrain.prepare.folder import already_there, only_process, parts_folder
from pretrain.prepare.output import Selection, assemble, draw_lengths
from pretrain.prepare.parts import (
    PART_BYTES,
    Part,
    finished_parts,
    unit_is_done,
    unit_key,
)
from pretrain.prepare.progress import ProgressCallback
from pretrain.prepare.tracker import Tracker
from pretrain.prepare.train_tokenizer import (
    MIN_VOCABULARY,
    most_bytes_read,
    train_tokenizer_on,
    training_request,
)
from pretrain.prepare.workers import tokenize_units
from pretrain.utils.files import atomic_folder, copy_folder, own_path, remove_leftovers, write_atomically

LENGTHS_FILE = "document_lengths.png"
VALIDATION_FRACTION = 0.05
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _Job:
    """The arguments of a preparation."""

    source: TextSource
    out: Path
    tokenizer: Tokenizer | None
    train_tokenizer: int | None
    selection: Selection
    report: ProgressCallback
    part_bytes: int = PART_BYTES

    def request(self) -> dict[str, Any]:
        """All that decides the content of the folder; options appear only when used."""
        options = {
            "validation_documents": self.selection.validation_documents,
            "drop_duplicates": self.selection.drop_duplicates or None,
            "max_tokens": self.selection.max_tokens,
        }
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source.fingerprint(),
            "tokenizer": (
                tokenizer_hash(self.tokenizer) if self.tokenizer else training_request(self.train_tokenizer)
            ),
            "validation_fraction": self.selection.validation_fraction,
            **{key: value for key, value in options.items() if value is not None},
        }

    @property
    def parts_folder(self) -> Path:
        """The folder of finished parts. It may be used by several machines at once."""
        return parts_folder(self.out)


@dataclass(frozen=True)
class _Plan:
    """The result of the set-up."""

    tokenizer: Tokenizer
    work: list[tuple[Unit, str]]
    """Every unit of the source with the key of its parts."""
    manifest: dict[str, Any]
    """All that the assembly needs besides the parts (JSON)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)


def prepare(
    source: TextSource,
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    train_tokenizer: int | None = None,
    validation_fraction: float = VALIDATION_FRACTION,
    validation_documents: int | None = None,
    drop_duplicates: bool = False,
    max_tokens: int | None = None,
    processes: int = 1,
    draw: bool = False,
    progress: ProgressCallback | None = None,
    part_bytes: int = PART_BYTES,
) -> Path:
    """Write the corpus folder *out* from *source*, and return it.

    Give either a *tokenizer*, or in *train_tokenizer* the vocabulary size of a SentencePiece model that is
    trained on the training split. A folder that already holds this very corpus is left alone; any other
    content of *out* is refused. Several processes may call this at once: one works, the others wait. What an
    interrupted call has finished is used by the next one.

    Args:
        validation_fraction: of documents, held out by the hash of their text.
        validation_documents: hold out this many different documents instead.
        drop_duplicates: keep the first of documents with equal text only.
        max_tokens: keep documents, in order, while both splits together have at most this many tokens.
        processes: how many tokenize; the output does not depend on it.
        draw: draw the histogram of document lengths.
        part_bytes: text after which finished work is saved.

    Raises:
        UserError: bad input.
    """
    job = _job(
        source, out, tokenizer, train_tokenizer, progress,
        Selection(validation_fraction, validation_documents, drop_duplicates, max_tokens), part_bytes,
    )  # fmt: skip
    _check_processes(processes)
    request = job.request()
    if already_there(job.out, request):
        return job.out
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with only_process(job.out, job.report):
        if already_there(job.out, request):
            return job.out
        plan = _set_up(job, request)
        parts = _tokenize(job, plan, plan.work, processes, max_tokens)
        _finish(job.out, plan.manifest, parts, draw)
    return job.out


def prepare_share(
    source: TextSource,
    out: str | os.PathLike[str],
    share: tuple[int, int],
    selection: Selection,
    *,
    tokenizer: Tokenizer | None = None,
    train_tokenizer: int | None = None,
    processes: int = 1,
    progress: ProgressCallback | None = None,
    part_bytes: int = PART_BYTES,
) -> int:
    """Tokenize the units i, i + n, … of the source, *share* being (i, n); :func:`merge` makes the folder.

    Shares may be worked on by any number of machines with a shared file system. Arguments as for :func:`prepare`,
    the same for all shares. A cap on tokens acts when the shares are merged.

    Returns:
        The number of units of this share.
    """
    number, count = share
    if not 0 <= number < count:
        raise UserError(
            f"shard: {number}/{count} is out of range; valid: 0/{max(count, 1)} to "
            f"{max(count, 1) - 1}/{max(count, 1)}"
        )
    job = _job(source, out, tokenizer, train_tokenizer, progress, selection, part_bytes)
    _check_processes(processes)
    request = job.request()
    if already_there(job.out, request):
        return 0
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with only_process(job.out, job.report):  # one trains the tokenizer and writes the manifest
        plan = _set_up(job, request)
    work = plan.work[number::count]
    _tokenize(job, plan, work, processes, max_tokens=None)
    return len(work)


def merge(out: str | os.PathLike[str], draw: bool = False) -> Path:
    """Make the folder *out* of the parts that :func:`prepare_share` has left beside it.

    Raises:
        UserError: no parts, or units that are not done.
    """
    out = Path(out)
    folder = parts_folder(out)
    manifest = _read_manifest(out)
    if manifest is None:
        if (out / META_FILE).is_file():
            return out
        raise UserError(
            f"merge: nothing is prepared for {str(out)!r}; "
            "first: python -m pretrain.prepare … --shard I/N, for every I below N"
        )
    with only_process(out, lambda _: None):
        if already_there(out, manifest["request"]):
            return out
        missing = _missing(out, manifest)
        if missing:
            raise UserError(
                f"merge: {len(missing)} of {len(manifest['units'])} units of {str(out)!r} are not tokenized (numbers "
                f"{', '.join(map(str, missing[:5]))}{', …' if len(missing) > 5 else ''}; unit u belongs to shard "
                "u mod N); run their shards again"
            )
        _finish(
            out, manifest, [part for key in manifest["units"] for part in finished_parts(folder, key)], draw
        )
    return out


def units_missing(out: str | os.PathLike[str]) -> int:
    """Number of units of *out* that are not tokenized yet; 0 when there is nothing to do or all is merged."""
    manifest = _read_manifest(Path(out))
    return len(_missing(Path(out), manifest)) if manifest else 0


def _read_manifest(out: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((parts_folder(out) / _MANIFEST).read_text("utf-8")))
    except (OSError, ValueError):
        return None


def _missing(out: Path, manifest: dict[str, Any]) -> list[int]:
    """Numbers of the units that are not complete."""
    folder = parts_folder(out)
    return [number for number, key in enumerate(manifest["units"]) if not unit_is_done(folder, key)]


def _job(
    source: TextSource,
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    train_tokenizer: int | None,
    progress: ProgressCallback | None,
    selection: Selection,
    part_bytes: int,
) -> _Job:
    if (tokenizer is None) == (train_tokenizer is None):
        raise UserError("tokenizer: give either a tokenizer or a vocabulary size to train, and not both")
    if train_tokenizer is not None and not MIN_VOCABULARY <= train_tokenizer <= 1_000_000:
        raise UserError(
            f"train_tokenizer: {train_tokenizer} is out of range; valid: {MIN_VOCABULARY} to 1000000"
        )
    if tokenizer is not None:
        tokenizer.check_spelling()
    source.check()
    report = progress or (lambda _: None)
    return _Job(source, Path(out), tokenizer, train_tokenizer, selection, report, part_bytes)


def _check_processes(processes: int) -> None:
    if processes < 1:
        raise UserError(f"processes: {processes} is out of range; valid: 1 or more")


def prepare_builtin(
    data_root: str | os.PathLike[str] = "data",
    vocab_size: int = 4096,
    progress: ProgressCallback | None = None,
) -> Path:
    """The built-in corpus, prepared once per content and settings: ``DATA_ROOT/builtin-HASH``.

    HASH covers the texts, the tokenizer's settings, the split and the format, so another Python version gets
    another folder. When the folder is there this takes the time of hashing 12 MB.
    """
    source = BuiltinCorpus()
    settings = f"{FORMAT_VERSION} {source.fingerprint()} {training_request(vocab_size)} {VALIDATION_FRACTION}"
    folder = Path(data_root) / f"builtin-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    if (folder / META_FILE).is_file():  # written before the folder got its name
        return folder
    return prepare(source, folder, train_tokenizer=vocab_size, progress=progress)


def _set_up(job: _Job, request: dict[str, Any]) -> _Plan:
    """The tokenizer, the list of units and the manifest, in the folder of parts. The caller holds the lock."""
    folder = job.parts_folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    tokenizer = job.tokenizer or _trained_tokenizer(job, request)
    saved = folder / f"tokenizer-{tokenizer_hash(tokenizer)[:20]}"
    _save_once(tokenizer, saved)
    settings = f"{FORMAT_VERSION} {tokenizer_hash(tokenizer)} {job.source.settings()} {job.part_bytes}"
    work = [(unit, unit_key(unit, settings)) for unit in job.source.units()]
    manifest = {
        "request": request,
        "source": job.source.describe(),
        "origin": job.source.origin(),
        "extent": job.source.extent(),
        "tokenizer_folder": saved.name,
        "tokenizer": {
            "name": tokenizer.name,
            "hash": tokenizer_hash(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
        },
        "selection": vars(job.selection),
        "units": [key for _, key in work],
    }
    if isinstance(job.source, WithValidation):
        manifest["validation_units"] = sum(unit.place[0] == "validation" for unit, _ in work)
    write_atomically(folder / _MANIFEST, json.dumps(manifest))
    return _Plan(tokenizer, work, manifest)


def _trained_tokenizer(job: _Job, request: dict[str, Any]) -> Tokenizer:
    """The tokenizer trained on the source's training split; made once for a source and settings."""
    assert job.train_tokenizer is not None
    most_bytes = most_bytes_read(job.selection.max_tokens)
    training_settings = {
        key: value for key, value in request.items() if key not in ("max_tokens", "drop_duplicates")
    }
    if most_bytes is not None:
        training_settings["most_bytes"] = most_bytes
    name = (
        f"trained-{hashlib.sha256(json.dumps(training_settings, sort_keys=True).encode()).hexdigest()[:20]}"
    )
    folder = job.parts_folder / name
    if folder.is_dir():
        return load_tokenizer(folder)
    tokenizer = train_tokenizer_on(
        job.source, job.train_tokenizer, job.selection.validation_fraction,
        job.selection.validation_documents, most_bytes, job.report,
    )  # fmt: skip
    _save_once(tokenizer, folder)
    return tokenizer


def _save_once(tokenizer: Tokenizer, folder: Path) -> None:
    """Save *tokenizer* in *folder*, whole or not at all; another machine may be doing the same."""
    if folder.is_dir():
        return
    with (
        contextlib.suppress(FileExistsError),
        atomic_folder(folder, own_path(folder), replace=False) as partial,
    ):
        tokenizer.save(partial)


def _tokenize(
    job: _Job, plan: _Plan, work: Sequence[tuple[Unit, str]], processes: int, max_tokens: int | None
) -> list[Part]:
    """Tokenize the missing units of *work*; returns its parts in order, up to the cap on tokens if there is one."""
    tracker = Tracker(
        job.parts_folder, work, dataclasses.replace(job.selection, max_tokens=max_tokens), job.report
    )
    if not tracker.enough():
        missing = tracker.missing()
        tokenize_units(
            job.source, missing, job.parts_folder, plan.tokenizer,
            job.parts_folder / plan.manifest["tokenizer_folder"], plan.dtype, processes,
            tracker.add, lambda position: tracker.unit_done(*missing[position]), job.part_bytes,
            # Among duplicates, one unit alone does not tell how many of its tokens count.
            None if job.selection.drop_duplicates else max_tokens,
        )  # fmt: skip
    return tracker.finish()


def _finish(out: Path, manifest: dict[str, Any], parts: Sequence[Part], draw: bool) -> None:
    """Assemble the parts into *out* and remove them. The caller holds the lock."""
    folder = parts_folder(out)
    # One name per machine: an existing folder was left by a process that died, since we hold the lock.
    partial = out.parent / f".{out.name}.partial-{socket.gethostname()}"
    try:
        with atomic_folder(out, partial, replace=False):
            _assemble(folder, manifest, parts, partial, draw)
    except FileExistsError:
        # Without locks another machine may have finished first; its folder has the same content.
        if not (out / META_FILE).is_file():
            raise
    shutil.rmtree(folder, ignore_errors=True)


def _assemble(
    folder: Path, manifest: dict[str, Any], parts: Sequence[Part], partial: Path, draw: bool
) -> None:
    """Fill *partial* with the corpus made of *parts*, whose tokenizer lies in *folder*."""
    copy_folder(folder / manifest["tokenizer_folder"], partial / "tokenizer")
    tokenizer, selection = manifest["tokenizer"], Selection(**manifest["selection"])
    dtype = token_dtype(tokenizer["vocab_size"])
    validation_parts: int | None = None
    if "validation_units" in manifest:
        held_out = set(manifest["units"][: manifest["validation_units"]])
        validation_parts = sum(part.prefix.name.rpartition("-")[0] in held_out for part in parts)
    written = assemble(
        parts, partial, tokenizer["vocab_size"], selection, manifest["extent"], validation_parts
    )
    split: dict[str, Any] = {"by": "hash of the document's text"}
    if validation_parts is not None:
        split = {"by": "a source of its own"}
    elif selection.validation_documents is None:
        split["validation_fraction"] = selection.validation_fraction
    else:
        split["validation_documents"] = selection.validation_documents
    meta = {
        "format_version": FORMAT_VERSION,
        "source": manifest["source"],
        "source_files": manifest.get("origin", {}),  # parts of an earlier version have none
        "content_hash": written.pop("content_hash"),
        "tokenizer": tokenizer,
        "dtype": dtype.name,
        "split": split,
        "skipped": written.pop("skipped"),
        **written,
        "request": manifest["request"],
    }
    if draw:
        draw_lengths(meta["document_lengths"], partial / LENGTHS_FILE)
    (partial / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", "utf-8")
