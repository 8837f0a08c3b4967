"""Makes a corpus folder from a text source of any size and a tokenizer, written once and atomically.

    OUT/training.bin .idx, validation.bin .idx   Megatron format; every document ends with its token
    OUT/tokenizer/                               what load_tokenizer reads
    OUT/meta.json                                what is in the folder and what it was made from

The same source and settings give byte-identical folders, whatever the number of processes and however often
the work was interrupted. It has three steps: set up (tokenizer, list of units), tokenize the units into
parts, assemble the parts. Finished parts lie in ``.OUT.partial-parts`` until the folder exists, so the disk
must hold the tokens twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from model.errors import UserError
from pretrain.data.indexed import token_dtype
from pretrain.data.meta import FORMAT_VERSION, CorpusMeta, SplitEntry, TokenizerEntry
from pretrain.data.sentencepiece_bpe import find_export_obstacle
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from pretrain.prepare.assemble import DEFAULT_SELECTION, SPLITS, Selection, assemble
from pretrain.prepare.parts import PART_BYTES, Job, Part, find_finished_parts, is_complete, unit_key
from pretrain.prepare.progress import Report, report_nothing
from pretrain.prepare.round_trip import check_round_trip
from pretrain.prepare.sources.text_source import Document, TextSource, Unit
from pretrain.prepare.tokenizing import Tokenizing
from pretrain.prepare.train_tokenizer import most_bytes_read, train_tokenizer_on, training_request
from pretrain.utils.files import (
    atomic_folder,
    copy_folder,
    open_lock,
    refuse_other_kind,
    remove_leftovers,
    temporary_path,
    wait_for_lock,
)

VOCABULARIES = range(260, 1_000_001)
"""Entries that a trained tokenizer may have: 256 bytes, two special tokens and some text at least."""


def check_vocabulary(size: int) -> None:
    """Raise UserError if a tokenizer of *size* entries is not trained."""
    if size not in VOCABULARIES:
        raise UserError(
            f"train_tokenizer: {size} is not valid; give {VOCABULARIES.start} to {VOCABULARIES.stop - 1}"
        )


def check_tokenizer(tokenizer: Tokenizer | int) -> None:
    """Raise UserError if no corpus of text is made with *tokenizer*, or with one of so many entries."""
    if isinstance(tokenizer, int):
        check_vocabulary(tokenizer)
    else:
        tokenizer.check_spelling()


def tokenizer_request(tokenizer: Tokenizer | int) -> str:
    """What identifies a tokenizer, or one that is to be trained."""
    return training_request(tokenizer) if isinstance(tokenizer, int) else tokenizer_hash(tokenizer)


@dataclass(frozen=True)
class Preparation:
    """The making of a corpus folder.

    A folder that already holds this very corpus is left alone; any other content of *out* is rejected.
    Several processes may work on it at once: one works, the others wait. What an interrupted one has finished
    is used by the next.

    Raises:
        UserError: bad input.
    """

    source: TextSource
    out: Path
    tokenizer: Tokenizer | int
    """An integer trains a SentencePiece model of so many entries on the training split."""
    selection: Selection = DEFAULT_SELECTION
    report: Report = report_nothing
    processes: int = 1
    """How many tokenize; the output does not depend on it."""
    part_bytes: int = PART_BYTES
    """Of text, after which finished work is saved."""
    lossy_tokenizer: bool = False
    """Whether a tokenizer that changes the text is taken."""

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer)
        self.source.check()

    @property
    def parts_folder(self) -> Path:
        """Where the parts and the tokenizer are until *out* is written. Several machines may use it at
        once."""
        return self.out.parent / f".{self.out.name}.partial-parts"

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
            **({"lossy_tokenizer": True} if self.lossy_tokenizer else {}),
        }

    def make(self) -> Path:
        """Write the corpus folder, and return it."""
        request = self.request()
        with claim_corpus(self.out, request, self.report) as to_do:
            if to_do:
                saved, work = self._set_up(request)
                self._finish(request, saved, self._tokenize(saved, work, self.selection.max_tokens))
        return self.out

    def make_share(self, number: int, count: int) -> Path | None:
        """Tokenize the units *number*, *number* + *count*, … of the source. The share that is done last
        writes the folder.

        Shares may be worked on by any number of machines with a shared file system. A cap on tokens acts when
        all are done.

        Returns:
            The folder, or None while units of other shares are missing.
        """
        if not 0 <= number < count:
            last = max(count, 1)
            raise UserError(f"shard: {number}/{count} is out of range; valid: 0/{last} to {last - 1}/{last}")
        request = self.request()
        with claim_corpus(self.out, request, self.report) as to_do:
            if not to_do:
                return self.out
            saved, work = self._set_up(request)  # one trains the tokenizer
        self._tokenize(saved, work[number::count], max_tokens=None)
        with claim_corpus(self.out, request, self.report) as to_do:
            if to_do:
                parts = [find_finished_parts(self.parts_folder, key) for _, key in work]
                if not all(map(is_complete, parts)):
                    return None
                self._finish(request, saved, parts)
        return self.out

    def _set_up(self, request: dict[str, Any]) -> tuple[Path, list[tuple[Unit, str]]]:
        """The folder of the tokenizer, next to the parts, and the units with their keys. A tokenizer that is
        to be trained is trained once for a source and settings. The caller holds the lock."""
        units = self.source.units()
        most_bytes = most_bytes_read(self.selection.max_tokens)
        settings = {
            key: value for key, value in request.items() if key not in ("max_tokens", "drop_duplicates")
        }
        digest = hashlib.sha256(json.dumps([settings, most_bytes], sort_keys=True).encode()).hexdigest()
        saved, tokenizer = self.parts_folder / f"tokenizer-{digest[:20]}", self.tokenizer
        if isinstance(tokenizer, Tokenizer) and not (self.lossy_tokenizer or saved.is_dir()):
            held_out = self.source.held_out_units() or 0
            for part in (units[:held_out], units[held_out:]):
                records = (record for unit in part for record in self.source.read(unit))
                check_round_trip(tokenizer, (each for each in records if isinstance(each, Document)))
        if isinstance(tokenizer, Tokenizer) and (obstacle := find_export_obstacle(tokenizer)):
            self.report(
                f"note        a run on this corpus cannot be exported to Hugging Face: tokenizer {obstacle}"
            )
        self.parts_folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.parts_folder)
        if not saved.is_dir():
            if isinstance(tokenizer, int):
                fraction = self.selection.validation_fraction
                tokenizer = train_tokenizer_on(self.source, tokenizer, fraction, most_bytes, self.report)
            # Without locks another machine may be doing the same.
            with (
                contextlib.suppress(FileExistsError),
                atomic_folder(saved, temporary_path(saved), replace=False) as partial,
            ):
                tokenizer.save(partial)
        entry = tokenizer_hash(load_tokenizer(saved))
        key = f"{FORMAT_VERSION} {entry} {self.source.settings()} {self.part_bytes}"
        seen: Counter[str] = Counter()
        work = []
        for unit in units:  # files of equal name, size and time in different folders have equal keys
            count = seen[unit.key]
            seen[unit.key] += 1
            work.append((unit, unit_key(unit, f"{key} {count}" if count else key)))
        return saved, work

    def _tokenize(
        self, saved: Path, work: Sequence[tuple[Unit, str]], max_tokens: int | None
    ) -> list[list[Part]]:
        """Tokenize the missing units of *work*; returns the parts of each in order, up to the cap if there is
        one."""
        selection = replace(self.selection, max_tokens=max_tokens)
        # Among duplicates, one unit alone does not tell how many of its tokens count.
        most = None if selection.drop_duplicates else max_tokens
        job = Job(self.source, self.parts_folder, saved, self.part_bytes, most)
        return Tokenizing(job, work, selection, self.report).run(self.processes)

    def _finish(self, request: dict[str, Any], saved: Path, parts: Sequence[Sequence[Part]]) -> None:
        """Assemble the parts of all units into the folder and remove them. The caller holds the lock."""
        tokenizer, held_out_units = load_tokenizer(saved), self.source.held_out_units()
        split: dict[str, Any] = {"by": "a source of its own"}
        validation_parts = None
        if held_out_units is None:
            fraction = self.selection.validation_fraction
            split = {"by": "hash of the document's text", "validation_fraction": fraction}
        else:
            validation_parts = sum(map(len, parts[:held_out_units]))
        with new_folder(self.out) as partial:
            copy_folder(saved, partial / "tokenizer")
            written = assemble(
                list(itertools.chain.from_iterable(parts)),
                partial,
                tokenizer.vocab_size,
                self.selection,
                self.source.name,
                validation_parts,
            )
            splits = {name: written[name] for name in SPLITS}
            CorpusMeta(
                source=self.source.describe(),
                dtype=token_dtype(tokenizer.vocab_size).name,
                split=split,
                request=request,
                tokenizer=TokenizerEntry.from_tokenizer(tokenizer),
                **written,
            ).write(partial)
        if held_out_units is None and (
            line := describe_uneven_split(self.selection.validation_fraction, **splits)
        ):
            self.report(line)
        if line := describe_control_strings(tokenizer, itertools.chain.from_iterable(parts)):
            self.report(line)
        shutil.rmtree(self.parts_folder, ignore_errors=True)


def describe_control_strings(tokenizer: Tokenizer, parts: Iterable[Part]) -> str:
    """How many documents of *parts* contain control strings, and what became of these; empty: none does."""
    markers = [part.marker for part in parts]
    if not (found := sum(marker.with_control_strings for marker in markers)):
        return ""
    specials, total = tokenizer.special_texts(), sum(marker.documents for marker in markers)
    shown = ", ".join(specials[:4]) + (", …" if len(specials) > 4 else "")
    as_tokens = any(len(tokenizer.encode(text)) == 1 for text in specials)
    became = "they became these tokens" if as_tokens else "they are kept as text"
    contain = f"contain control strings of the tokenizer ({shown})"
    return f"{found:,} of {total:,} documents that were tokenized {contain}; {became}"


def describe_uneven_split(fraction: float, training: SplitEntry, validation: SplitEntry) -> str:
    """A warning where the split by hash holds out less than half of *fraction* of the tokens, or more than
    twice as much, as it may among few documents or ones of very different lengths; else empty."""
    share = validation.tokens / (training.tokens + validation.tokens)
    if fraction / 2 <= share <= 2 * fraction:
        return ""
    return (
        f"{share:.1%} of the tokens ({validation.documents:,} of "
        f"{training.documents + validation.documents:,} documents) are held out for validation; "
        f"{fraction:.1%} were requested. With few documents the share is random; "
        "--validation_text PATH, of a data set --validation_split NAME, chooses them"
    )


def make_corpus(
    source: TextSource,
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | int,
    selection: Selection = DEFAULT_SELECTION,
    report: Report = report_nothing,
) -> Path:
    """Write the corpus folder *out* in this process, and return it; see Preparation."""
    return Preparation(source, Path(out), tokenizer, selection, report).make()


# ---------------------------------------------------------------------- the folder


def find_existing(out: Path, request: dict[str, Any]) -> bool:
    """True if *out* holds the requested corpus, False if it is free; UserError if it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    refuse_other_kind(out, "corpus", "out")
    try:
        present = CorpusMeta.read(out).request or {}
    except UserError:
        raise UserError(f"out: {str(out)!r} exists and is not a corpus; valid: a new folder") from None
    if present == request:
        return True
    differing = ", ".join(key for key in request | present if present.get(key) != request.get(key))
    raise UserError(f"out: {str(out)!r} holds another corpus (differs in {differing}); give another --out")


@contextlib.contextmanager
def claim_corpus(out: Path, request: dict[str, Any], report: Report) -> Iterator[bool]:
    """Yield whether the requested corpus is still to be made in *out*, holding its lock if so.

    The kernel frees the lock when its holder ends in any way.

    Raises:
        UserError: *out* holds something else.
    """
    if find_existing(out, request):
        yield False
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = open_lock(out.parent / f".{out.name}.lock")
    try:
        # A file system may have no locks: renaming is still atomic, at worst the work is done twice. Another
        # process of this user may prepare for hours, so there is no limit.
        wait_for_lock(lock, lambda: report(f"waiting for another process that prepares {out}"))
        yield not find_existing(out, request)
    finally:
        os.close(lock)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes *out*. The caller holds the lock."""
    remove_leftovers(out.parent)
    # Without locks another machine may finish first; its folder has the same content.
    with (
        contextlib.suppress(FileExistsError),
        atomic_folder(out, temporary_path(out), replace=False) as partial,
    ):
        yield partial
