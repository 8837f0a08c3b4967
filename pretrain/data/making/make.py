"""Makes a corpus folder from a text source of any size and a tokenizer, written once and atomically.

    OUT/training.bin .idx, validation.bin .idx   Megatron format; every document ends with its token
    OUT/tokenizer/                               what load_tokenizer reads
    OUT/training_counts.npy                      how often each token occurs in the training split
    OUT/meta.json                                what is in the folder and what it was made from

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.declared import Count, declared, from_plain, to_plain
from model.errors import UserError
from pretrain.data.indexed import token_dtype
from pretrain.data.making.assemble import DEFAULT_SELECTION, Selection, assemble
from pretrain.data.making.folder import new_folder, to_be_made
from pretrain.data.making.parts import PART_BYTES, Job, Part, finished_parts, is_complete, unit_key
from pretrain.data.making.progress import Report, silent
from pretrain.data.making.tokenizing import Tokenizing
from pretrain.data.making.train_tokenizer import most_bytes_read, train_tokenizer_on, training_request
from pretrain.data.meta import FORMAT_VERSION, META_FILE, CorpusMeta, TokenizerEntry
from pretrain.data.sources.source import TextSource, Unit
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.utils.files import atomic_folder, copy_folder, own_path, remove_leftovers, write_atomically

VOCABULARIES = range(260, 1_000_001)
"""Entries that a trained tokenizer may have: 256 bytes, two special tokens and some text at least."""
_MANIFEST = "manifest.json"


def check_vocabulary(size: int) -> None:
    """Raise UserError if a tokenizer of *size* entries is not trained."""
    if size not in VOCABULARIES:
        raise UserError(
            f"train_tokenizer: {size} is not valid; give {VOCABULARIES.start} to {VOCABULARIES.stop - 1}"
        )


def tokenizer_request(tokenizer: Tokenizer | int) -> str:
    """What identifies a tokenizer, or one that is to be trained."""
    return training_request(tokenizer) if isinstance(tokenizer, int) else tokenizer_hash(tokenizer)


@declared("manifest")
class Manifest:
    """All that the assembly needs besides the parts."""

    meta: dict[str, Any]
    """Entries of CorpusMeta."""
    tokenizer: TokenizerEntry
    selection: Selection
    units: list[str]
    """Keys of all units, in order."""
    validation_units: Count | None
    """See TextSource.held_out_units."""

    @classmethod
    def read(cls, out: Path) -> Manifest | None:
        """That of the unfinished corpus *out*, if there is one."""
        try:
            return from_plain(cls, json.loads((parts_folder(out) / _MANIFEST).read_text("utf-8")))
        except (OSError, ValueError, RecursionError):
            return None

    def missing(self, folder: Path) -> list[int]:
        """Numbers of the units that are not complete."""
        return [
            number for number, key in enumerate(self.units) if not is_complete(finished_parts(folder, key))
        ]


@dataclass(frozen=True)
class Preparation:
    """The making of a corpus folder.

    A folder that already holds this very corpus is left alone; any other content of *out* is refused. Several
    processes may work on it at once: one works, the others wait. What an interrupted one has finished is used
    by the next.

    Raises:
        UserError: bad input.
    """

    source: TextSource
    out: Path
    tokenizer: Tokenizer | int
    """An integer trains a SentencePiece model of so many entries on the training split."""
    selection: Selection = DEFAULT_SELECTION
    report: Report = silent
    processes: int = 1
    """How many tokenize; the output does not depend on it."""
    part_bytes: int = PART_BYTES
    """Of text, after which finished work is saved."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UserError(f"processes: {self.processes} is not valid; give a number from 1")
        if isinstance(self.tokenizer, int):
            check_vocabulary(self.tokenizer)
        else:
            self.tokenizer.check_spelling()
        self.source.check()

    def request(self) -> dict[str, Any]:
        """All that decides the content of the folder; options appear only when used."""
        chosen = asdict(self.selection)
        fraction = chosen.pop("validation_fraction")
        return {
            "format_version": FORMAT_VERSION,
            "source": self.source.fingerprint(),
            "tokenizer": tokenizer_request(self.tokenizer),
            "validation_fraction": fraction,
            **{key: value for key, value in chosen.items() if value},
        }

    def make(self) -> Path:
        """Write the corpus folder, and return it."""
        request = self.request()
        with to_be_made(self.out, request, self.report) as to_do:
            if to_do:
                manifest, made, work = self._set_up(request)
                _finish(self.out, manifest, self._tokenize(made, work, self.selection.max_tokens))
        return self.out

    def make_share(self, number: int, count: int) -> int:
        """Tokenize the units *number*, *number* + *count*, … of the source; :func:`merge` makes the folder.

        Shares may be worked on by any number of machines with a shared file system. A cap on tokens acts when
        the shares are merged.

        Returns:
            The number of units of this share.
        """
        if not 0 <= number < count:
            last = max(count, 1)
            raise UserError(f"shard: {number}/{count} is out of range; valid: 0/{last} to {last - 1}/{last}")
        request = self.request()
        with to_be_made(self.out, request, self.report) as to_do:
            if not to_do:
                return 0
            _, made, work = self._set_up(request)  # one trains the tokenizer and writes the manifest
        self._tokenize(made, work[number::count], max_tokens=None)
        return len(work[number::count])

    def _set_up(self, request: dict[str, Any]) -> tuple[Manifest, Tokenizer, list[tuple[Unit, str]]]:
        """The manifest, the tokenizer, and the units with their keys. Tokenizer and manifest are in the
        folder of parts, too. The caller holds the lock."""
        folder, source = parts_folder(self.out), self.source
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        tokenizer = self._made_tokenizer(folder, request)
        entry = TokenizerEntry.of(tokenizer)
        _save_once(tokenizer, _tokenizer_folder(folder, entry.hash))
        settings = f"{FORMAT_VERSION} {entry.hash} {source.settings()} {self.part_bytes}"
        work = [(unit, unit_key(unit, settings)) for unit in source.units()]
        chosen, held_out_units = self.selection, source.held_out_units()
        split: dict[str, Any] = {"by": "hash of the document's text"}
        if held_out_units is not None:
            split = {"by": "a source of its own"}
        elif chosen.validation_documents is None:
            split["validation_fraction"] = chosen.validation_fraction
        else:
            split["validation_documents"] = chosen.validation_documents
        meta = {
            "source": source.describe(),
            "source_files": source.origin(),
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "split": split,
            "request": request,
        }
        manifest = Manifest(meta, entry, chosen, [key for _, key in work], held_out_units)
        write_atomically(folder / _MANIFEST, json.dumps(to_plain(manifest)))
        return manifest, tokenizer, work

    def _made_tokenizer(self, folder: Path, request: dict[str, Any]) -> Tokenizer:
        """The tokenizer; if it is to be trained, it is trained once for a source and settings."""
        if not isinstance(self.tokenizer, int):
            return self.tokenizer
        chosen = self.selection
        most_bytes = most_bytes_read(chosen.max_tokens)
        settings = {
            key: value for key, value in request.items() if key not in ("max_tokens", "drop_duplicates")
        }
        digest = hashlib.sha256(json.dumps([settings, most_bytes], sort_keys=True).encode()).hexdigest()
        trained = folder / f"trained-{digest[:20]}"
        if not trained.is_dir():
            held_out = (chosen.validation_fraction, chosen.validation_documents)
            made = train_tokenizer_on(self.source, self.tokenizer, *held_out, most_bytes, self.report)
            _save_once(made, trained)
        return load_tokenizer(trained)

    def _tokenize(
        self, tokenizer: Tokenizer, work: Sequence[tuple[Unit, str]], max_tokens: int | None
    ) -> list[Part]:
        """Tokenize the missing units of *work*; returns its parts in order, up to the cap if there is one."""
        folder = parts_folder(self.out)
        selection = dataclasses.replace(self.selection, max_tokens=max_tokens)
        # Among duplicates, one unit alone does not tell how many of its tokens count.
        most = None if selection.drop_duplicates else max_tokens
        saved = _tokenizer_folder(folder, tokenizer_hash(tokenizer))
        job = Job(self.source, folder, saved, self.part_bytes, most)
        return Tokenizing(job, work, selection, self.report).run(tokenizer, self.processes)


def make_corpus(
    source: TextSource,
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | int,
    selection: Selection = DEFAULT_SELECTION,
    report: Report = silent,
) -> Path:
    """Write the corpus folder *out* in this process, and return it; see Preparation."""
    return Preparation(source, Path(out), tokenizer, selection, report).make()


def merge(out: str | os.PathLike[str]) -> Path:
    """Make the folder *out* of the parts that Preparation.make_share has left beside it.

    Raises:
        UserError: no parts, or units that are not done.
    """
    out = Path(out)
    folder, manifest = parts_folder(out), Manifest.read(out)
    if manifest is None:
        if (out / META_FILE).is_file():
            return out
        raise UserError(
            f"merge: nothing is prepared for {str(out)!r}; "
            "first: python -m pretrain.prepare … --shard I/N, for every I below N"
        )
    with to_be_made(out, manifest.meta["request"], silent) as to_do:
        if not to_do:
            return out
        missing = manifest.missing(folder)
        if missing:
            raise UserError(
                f"merge: {len(missing)} of {len(manifest.units)} units of {str(out)!r} are not tokenized "
                f"(numbers {', '.join(map(str, missing[:5]))}{', …' if len(missing) > 5 else ''}; unit u "
                "belongs to shard u mod N); run their shards again"
            )
        _finish(out, manifest, [part for key in manifest.units for part in finished_parts(folder, key)])
    return out


def units_missing(out: str | os.PathLike[str]) -> int:
    """Number of units of *out* that are not tokenized yet; 0 when there is nothing to do or all is merged."""
    manifest = Manifest.read(Path(out))
    return len(manifest.missing(parts_folder(Path(out)))) if manifest else 0


def parts_folder(out: Path) -> Path:
    """The folder of the finished parts of *out* until it is written. Several machines may use it at once."""
    return out.parent / f".{out.name}.partial-parts"


def _tokenizer_folder(folder: Path, hash: str) -> Path:
    return folder / f"tokenizer-{hash[:20]}"


def _save_once(tokenizer: Tokenizer, folder: Path) -> None:
    """Save *tokenizer* in *folder*, whole or not at all; another machine may be doing the same."""
    if folder.is_dir():
        return
    with (
        contextlib.suppress(FileExistsError),
        atomic_folder(folder, own_path(folder), replace=False) as partial,
    ):
        tokenizer.save(partial)


def _finish(out: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Assemble the parts into *out* and remove them. The caller holds the lock."""
    folder, entry = parts_folder(out), manifest.tokenizer
    validation_parts: int | None = None
    if manifest.validation_units is not None:
        held_out = set(manifest.units[: manifest.validation_units])
        validation_parts = sum(part.prefix.name.rpartition("-")[0] in held_out for part in parts)
    with new_folder(out) as partial:
        copy_folder(_tokenizer_folder(folder, entry.hash), partial / "tokenizer")
        written = assemble(
            parts,
            partial,
            entry.vocab_size,
            manifest.selection,
            manifest.meta["source"]["name"],
            validation_parts,
        )
        CorpusMeta(**manifest.meta, tokenizer=entry, **written).write(partial)
    shutil.rmtree(folder, ignore_errors=True)
