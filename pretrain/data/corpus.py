"""Opens a corpus for reading: a prepared folder, or a ``.bin/.idx`` pair of Megatron-LM's
``preprocess_data`` and no other file."""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from model.errors import UserError
from pretrain.data.indexed import IndexedTokens, bin_path, idx_path
from pretrain.data.meta import META_FILE, PREPARE_AGAIN, CorpusMeta, SplitEntry, TokenizerEntry
from pretrain.data.same_tokenizer import tokenizer_difference
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.utils.files import update_from_file


@dataclass(frozen=True)
class Corpus:
    """An opened corpus folder."""

    folder: Path
    meta: CorpusMeta
    """``meta.json``."""
    tokenizer: Tokenizer
    training: IndexedTokens
    validation: IndexedTokens

    @classmethod
    def open(cls, folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> Corpus:
        """Open a folder written by ``prepare``, or the prefix of a ``.bin/.idx`` pair of Megatron's tools.

        Args:
            tokenizer: what a pair was tokenized with, which it does not record. A folder has its own, and a
                different one is rejected.

        Raises:
            UserError: *folder* is neither, a file is damaged, or the tokenizer is missing or different.
        """
        root = Path(folder)
        if is_prefix(root):
            if tokenizer is None:
                raise UserError(
                    f"data: {str(root)!r} is a .bin/.idx pair, which does not say its tokenizer; give "
                    "--tokenizer, such as --tokenizer gpt2"
                )
            meta, training, validation = _open_prefix(root, tokenizer)
            return cls(root, meta, tokenizer, training, validation)
        if not root.is_dir():
            raise UserError(
                f"data: {str(root)!r} is not a folder; valid: one written by head-schedules prepare"
            )
        meta = CorpusMeta.read(root)
        if not (root / "tokenizer").is_dir():
            raise UserError(
                f"data: {str(root)!r} has no tokenizer folder; delete it and prepare the corpus again"
            )
        own = load_tokenizer(root / "tokenizer")
        own.name = meta.tokenizer.name
        corpus = cls(root, meta, own, IndexedTokens(root / "training"), IndexedTokens(root / "validation"))
        corpus._check(tokenizer)
        return corpus

    def _check(self, tokenizer: Tokenizer | None) -> None:
        """Raise UserError if the files of the folder do not belong together, or to *tokenizer*."""
        place, own, meta = str(self.folder), self.tokenizer, self.meta
        entry_of_own = TokenizerEntry.from_tokenizer(own)
        claims: list[tuple[str, object, object]] = [
            (f"tokenizer.{name}", getattr(meta.tokenizer, name), getattr(entry_of_own, name))
            for name in ("hash", "vocab_size", "end_of_document")
        ]
        for name in ("training", "validation"):
            split, entry = getattr(self, name), getattr(meta, name)
            claims += [
                ("dtype", meta.dtype, split.dtype.name),
                (f"{name}.tokens", entry.tokens, split.num_tokens),
                (f"{name}.documents", entry.documents, split.num_documents),
            ]
            if entry.of_each_class is not None:
                claims.append((f"the sum of {name}.of_each_class", sum(entry.of_each_class), entry.documents))
            for path in (bin_path(self.folder / name), idx_path(self.folder / name)):
                file = (meta.files or {}).get(path.name)
                claims.append((f"files.{path.name}.bytes", file and file.bytes, path.stat().st_size))
        for key, said, found in claims:
            if said != found:
                raise UserError(
                    f"data: {META_FILE} in {place!r} says that {key} is {said}, but it is {found}: the files "
                    f"are of different corpora; {PREPARE_AGAIN}"
                )
        difference = tokenizer_difference(own, tokenizer) if tokenizer is not None else None
        if tokenizer is not None and difference:
            raise UserError(
                f"tokenizer: {place!r} was made with {own.name}, and not with {tokenizer.name} "
                f"({difference}); valid: its own tokenizer, or a corpus prepared with the other"
            )

    @property
    def name(self) -> str:
        """Name of the folder (or prefix)."""
        return self.folder.resolve().name


# Validation takes the last documents that together hold at least this share of the tokens. Megatron-LM itself
# splits by position in the file (--split 969,30,1). Our own corpora are split by a hash of the text, which a
# pair lacks.
VALIDATION_SHARE = 0.05
_SAMPLE = 1 << 20  # bytes at both ends of the .bin that stand for its content


def is_prefix(path: Path) -> bool:
    """Whether *path* is the common beginning of a ``.bin/.idx`` pair (and not a folder)."""
    return not path.is_dir() and (idx_path(path).is_file() or bin_path(path).is_file())


def _open_prefix(prefix: Path, tokenizer: Tokenizer) -> tuple[CorpusMeta, IndexedTokens, IndexedTokens]:
    """Open a pair: (metadata as in ``meta.json``, training documents, validation documents).

    Raises:
        UserError: damaged files, or fewer than two documents.
    """
    tokens = IndexedTokens(prefix)
    if tokens.num_documents < 2:
        raise UserError(
            f"data: {str(prefix)!r} has {tokens.num_documents} documents; needed: at least two, one for "
            "validation"
        )
    first = _first_of_validation(tokens)
    training, validation = tokens.slice(0, first), tokens.slice(first, tokens.num_documents)
    meta = CorpusMeta(
        source={"name": prefix.name, "format": "megatron"},
        content_hash=_content_hash(prefix),
        tokenizer=TokenizerEntry.from_tokenizer(tokenizer),
        dtype=tokens.dtype.name,
        split={"by": "position", "validation_share_of_tokens": VALIDATION_SHARE},
        skipped={},
        training=SplitEntry(training.num_documents, None, training.num_tokens),
        validation=SplitEntry(validation.num_documents, None, validation.num_tokens),
    )
    return meta, training, validation


def _first_of_validation(tokens: IndexedTokens) -> int:
    """Index of the first document held out: the last one that begins at or before the beginning of the share;
    never 0, so that something is left to train on."""
    split_position = tokens.num_tokens * (1 - VALIDATION_SHARE)
    after = bisect.bisect_right(range(tokens.num_documents), split_position, lo=2, key=tokens.start_of)
    return after - 1


def _content_hash(prefix: Path) -> str:
    """Hash of the index, the size of the token file, and both its ends: reading all of it would
    take minutes."""
    digest = xxhash.xxh3_128()
    update_from_file(digest, idx_path(prefix))
    path = bin_path(prefix)
    size = path.stat().st_size
    digest.update(np.int64(size).tobytes())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read())
    return digest.hexdigest()
