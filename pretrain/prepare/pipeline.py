"""Makes a corpus folder from text of any size; see pretrain/data/making/make.py for what is in it.

    OUT/document_lengths.png                     on request

The same source and settings give byte-identical folders, whatever the number of processes and however often
the work was interrupted. It has three steps: set up (tokenizer, list of units), tokenize the units into
parts, assemble the parts. Finished parts lie in ``.OUT.partial-parts`` until the folder exists, so the disk
must hold the tokens twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.declared import Count, declared, from_plain, to_plain
from model.errors import UserError
from pretrain.data.indexed import token_dtype
from pretrain.data.making.assemble import DEFAULT_SELECTION, Selection
from pretrain.data.making.folder import new_folder, to_be_made
from pretrain.data.making.make import Order, Plan, write_corpus
from pretrain.data.making.progress import ProgressCallback
from pretrain.data.making.train_tokenizer import most_bytes_read
from pretrain.data.meta import FORMAT_VERSION, META_FILE
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.prepare.lengths import LENGTHS_FILE, draw_lengths
from pretrain.prepare.parts import PART_BYTES, StoredPart, finished_parts, is_complete, unit_key
from pretrain.prepare.tracker import Tracker
from pretrain.prepare.workers import Tokenizing, tokenize_units
from pretrain.utils.files import atomic_folder, copy_folder, own_path, remove_leftovers, write_atomically

_MANIFEST = "manifest.json"


@declared("manifest")
class Manifest:
    """All that the assembly needs besides the parts."""

    plan: Plan
    units: list[str]
    """Keys of all units, in order."""
    validation_units: Count | None
    """See TextSource.held_out_units."""

    def missing(self, folder: Path) -> list[int]:
        """Numbers of the units that are not complete."""
        return [
            number for number, key in enumerate(self.units) if not is_complete(finished_parts(folder, key))
        ]


@dataclass(frozen=True)
class Preparation:
    """A preparation; arguments as for ``prepare``."""

    order: Order
    out: Path
    processes: int
    report: ProgressCallback
    part_bytes: int

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UserError(f"processes: {self.processes} is not valid; give a number from 1")

    def set_up(self, request: dict[str, Any]) -> tuple[Manifest, Tokenizer, list[tuple[Unit, str]]]:
        """The manifest, the tokenizer, and the units with their keys. Tokenizer and manifest are in the
        folder of parts, too. The caller holds the lock."""
        folder = parts_folder(self.out)
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        tokenizer = self._made_tokenizer(folder, request)
        _save_once(tokenizer, _tokenizer_folder(folder, tokenizer_hash(tokenizer)))
        source = self.order.source
        settings = f"{FORMAT_VERSION} {tokenizer_hash(tokenizer)} {source.settings()} {self.part_bytes}"
        work = [(unit, unit_key(unit, settings)) for unit in source.units()]
        keys = [key for _, key in work]
        manifest = Manifest(self.order.plan(tokenizer, request), keys, source.held_out_units())
        write_atomically(folder / _MANIFEST, json.dumps(to_plain(manifest)))
        return manifest, tokenizer, work

    def _made_tokenizer(self, folder: Path, request: dict[str, Any]) -> Tokenizer:
        """The tokenizer; if it is to be trained, it is trained once for a source and settings."""
        if not isinstance(self.order.tokenizer, int):
            return self.order.tokenizer
        settings = {
            key: value for key, value in request.items() if key not in ("max_tokens", "drop_duplicates")
        }
        settings["most_bytes"] = most_bytes_read(self.order.selection.max_tokens)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        trained = folder / f"trained-{digest[:20]}"
        if not trained.is_dir():
            _save_once(self.order.made_tokenizer(self.report), trained)
        return load_tokenizer(trained)

    def tokenize(
        self, tokenizer: Tokenizer, work: Sequence[tuple[Unit, str]], max_tokens: int | None
    ) -> list[StoredPart]:
        """Tokenize the missing units of *work*; returns its parts in order, up to the cap if there is one."""
        folder, selection = parts_folder(self.out), self.order.selection
        tracker = Tracker(folder, work, dataclasses.replace(selection, max_tokens=max_tokens), self.report)
        how = Tokenizing(
            self.order.source,
            folder,
            _tokenizer_folder(folder, tokenizer_hash(tokenizer)),
            token_dtype(tokenizer.vocab_size),
            self.part_bytes,
            # Among duplicates, one unit alone does not tell how many of its tokens count.
            None if selection.drop_duplicates else max_tokens,
        )
        tokenize_units(how, tokenizer, tracker, self.processes)
        return tracker.finish()


def prepare(
    source: TextSource,
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | int,
    selection: Selection = DEFAULT_SELECTION,
    *,
    processes: int = 1,
    draw: bool = False,
    report: ProgressCallback = lambda _: None,
    part_bytes: int = PART_BYTES,
) -> Path:
    """Write the corpus folder *out* from *source*, and return it.

    A folder that already holds this very corpus is left alone; any other content of *out* is refused. Several
    processes may call this at once: one works, the others wait. What an interrupted call has finished is used
    by the next one.

    Args:
        tokenizer: an integer trains a SentencePiece model of so many entries on the training split.
        processes: how many tokenize; the output does not depend on it.
        draw: draw the histogram of document lengths.
        part_bytes: text after which finished work is saved.

    Raises:
        UserError: bad input.
    """
    preparation = Preparation(Order(source, tokenizer, selection), Path(out), processes, report, part_bytes)
    out, request = preparation.out, preparation.order.request()
    with to_be_made(out, request, report) as to_do:
        if not to_do:
            return out
        manifest, made, work = preparation.set_up(request)
        _finish(out, manifest, preparation.tokenize(made, work, selection.max_tokens), draw)
    return out


def prepare_share(
    source: TextSource,
    out: str | os.PathLike[str],
    share: tuple[int, int],
    tokenizer: Tokenizer | int,
    selection: Selection = DEFAULT_SELECTION,
    *,
    processes: int = 1,
    report: ProgressCallback = lambda _: None,
    part_bytes: int = PART_BYTES,
) -> int:
    """Tokenize the units i, i + n, … of the source, *share* being (i, n); :func:`merge` makes the folder.

    Shares may be worked on by any number of machines with a shared file system. Arguments as for
    :func:`prepare`, the same for all shares. A cap on tokens acts when the shares are merged.

    Returns:
        The number of units of this share.
    """
    number, count = share
    if not 0 <= number < count:
        last = max(count, 1)
        raise UserError(f"shard: {number}/{count} is out of range; valid: 0/{last} to {last - 1}/{last}")
    preparation = Preparation(Order(source, tokenizer, selection), Path(out), processes, report, part_bytes)
    request = preparation.order.request()
    with to_be_made(preparation.out, request, report) as to_do:
        if not to_do:
            return 0
        _, made, work = preparation.set_up(request)  # one trains the tokenizer and writes the manifest
    preparation.tokenize(made, work[number::count], max_tokens=None)
    return len(work[number::count])


def merge(out: str | os.PathLike[str], draw: bool = False) -> Path:
    """Make the folder *out* of the parts that :func:`prepare_share` has left beside it.

    Raises:
        UserError: no parts, or units that are not done.
    """
    out = Path(out)
    folder, manifest = parts_folder(out), _read_manifest(out)
    if manifest is None:
        if (out / META_FILE).is_file():
            return out
        raise UserError(
            f"merge: nothing is prepared for {str(out)!r}; "
            "first: python -m pretrain.prepare … --shard I/N, for every I below N"
        )
    with to_be_made(out, manifest.plan.request, lambda _: None) as to_do:
        if not to_do:
            return out
        missing = manifest.missing(folder)
        if missing:
            raise UserError(
                f"merge: {len(missing)} of {len(manifest.units)} units of {str(out)!r} are not tokenized "
                f"(numbers {', '.join(map(str, missing[:5]))}{', …' if len(missing) > 5 else ''}; unit u "
                "belongs to shard u mod N); run their shards again"
            )
        _finish(out, manifest, [part for key in manifest.units for part in finished_parts(folder, key)], draw)
    return out


def units_missing(out: str | os.PathLike[str]) -> int:
    """Number of units of *out* that are not tokenized yet; 0 when there is nothing to do or all is merged."""
    manifest = _read_manifest(Path(out))
    return len(manifest.missing(parts_folder(Path(out)))) if manifest else 0


def parts_folder(out: Path) -> Path:
    """The folder of the finished parts of *out* until it is written. Several machines may use it at once."""
    return out.parent / f".{out.name}.partial-parts"


def _tokenizer_folder(folder: Path, hash: str) -> Path:
    return folder / f"tokenizer-{hash[:20]}"


def _read_manifest(out: Path) -> Manifest | None:
    try:
        return from_plain(Manifest, json.loads((parts_folder(out) / _MANIFEST).read_text("utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def _save_once(tokenizer: Tokenizer, folder: Path) -> None:
    """Save *tokenizer* in *folder*, whole or not at all; another machine may be doing the same."""
    if folder.is_dir():
        return
    with (
        contextlib.suppress(FileExistsError),
        atomic_folder(folder, own_path(folder), replace=False) as partial,
    ):
        tokenizer.save(partial)


def _finish(out: Path, manifest: Manifest, parts: Sequence[StoredPart], draw: bool) -> None:
    """Assemble the parts into *out* and remove them. The caller holds the lock."""
    folder = parts_folder(out)
    validation_parts: int | None = None
    if manifest.validation_units is not None:
        held_out = set(manifest.units[: manifest.validation_units])
        validation_parts = sum(part.prefix.name.rpartition("-")[0] in held_out for part in parts)
    with new_folder(out) as partial:
        copy_folder(_tokenizer_folder(folder, manifest.plan.tokenizer.hash), partial / "tokenizer")
        meta = write_corpus(partial, manifest.plan, parts, validation_parts)
        if draw and meta.document_lengths:
            draw_lengths(meta.document_lengths, partial / LENGTHS_FILE)
    shutil.rmtree(folder, ignore_errors=True)
